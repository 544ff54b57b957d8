"""The names under which files carry parameters and buffers."""


def plain(name: str) -> str:
    """A parameter's name as files carry it, whether or not the model is compiled."""
    return name.replace("_orig_mod.", "")  # torch.compile's
