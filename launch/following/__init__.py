"""What `launch/follow.py` reads, remembers and shows. Nothing here changes a job."""
