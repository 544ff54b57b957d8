"""A second user's project: an image classifier, in the two files that one has to touch."""
