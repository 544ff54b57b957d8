"""The AWS variables of this process, replaced for a while: no account is read, none is reached."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

NO_ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nobody",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def replaced(values: Mapping[str, str]) -> Iterator[None]:
    """Within the block the only AWS variables are `values`; afterwards all is as it was."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
