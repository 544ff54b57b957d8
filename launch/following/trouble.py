"""What an AWS error means to somebody who follows a job: wait, go on without, or stop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    LoginTokenLoadError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.parsers import ResponseParserError

from launch.errors import Refused, one_line

_NO_CREDENTIALS = (
    *(CredentialRetrievalError, LoginTokenLoadError, NoCredentialsError, PartialCredentialsError),
    *(SSOTokenLoadError, TokenRetrievalError, UnauthorizedSSOTokenError),
)
_EXPIRED = {
    *("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"),
    *("InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId"),
    *("InvalidSignatureException", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure"),
    *("IncompleteSignature", "MissingAuthenticationToken", "MissingAuthenticationTokenException"),
}
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"}
_BUSY = {
    *("Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled"),
    *("RequestThrottledException", "TooManyRequestsException", "RequestLimitExceeded"),
    *("SlowDown", "LimitExceededException", "RequestTimeout", "RequestTimeoutException"),
    *("ServiceUnavailable", "ServiceUnavailableException", "InternalError", "InternalFailure"),
}


LONGEST_WAIT = 60.0
TRIES = 5  # so often AWS is asked, where nothing is there to be shown meanwhile


class Passing(Exception):
    """AWS is busy or out of reach; the same question may be answered later."""


class Withheld(Exception):
    """AWS does not answer this question to us, and will not soon."""


@contextmanager
def sorted_out() -> Iterator[None]:
    """Turn what goes wrong in a block into Passing, Withheld, or Refused for lost credentials."""
    try:
        yield
    except _NO_CREDENTIALS as error:
        raise Refused(_log_in(error)) from error
    except (ConnectionError, HTTPClientError) as error:
        raise Passing(one_line(error)) from error
    except ClientError as error:
        raise _meaning(error) from error
    except ResponseParserError as error:  # a proxy's page instead of AWS's answer
        raise Passing(one_line(error)) from error
    except BotoCoreError as error:
        raise Withheld(one_line(error)) from error


Answer = TypeVar("Answer")


def patiently(ask: Callable[[], Answer], sleep: Callable[[float], None]) -> Answer:
    """The answer to a question that is asked once. Raises Passing if AWS stays busy, and more."""
    for failures in range(1, TRIES):
        try:
            return ask()
        except Passing:
            sleep(backoff(failures))
    return ask()


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row: 1, 2, 4, … 60."""
    return float(min(LONGEST_WAIT, 2 ** min(failures - 1, 10)))


def code_of(error: BaseException | None) -> str:
    """The code of AWS's error, such as ResourceNotFoundException; empty where there is none."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _meaning(error: ClientError) -> Exception:
    code = code_of(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _EXPIRED:
        return Refused(_log_in(error))
    if code in _BUSY or status == 429 or status >= 500:
        return Passing(f"AWS is busy ({code})")
    if code in _DENIED:
        return Withheld(f"no permission ({one_line(error)})")
    return Withheld(one_line(error))


def _log_in(error: Exception) -> str:
    return (
        f"AWS does not accept your credentials any more, or found none ({one_line(error)}); log in "
        f"again, then go on watching with `python launch/follow.py`: the job does not depend on it"
    )
