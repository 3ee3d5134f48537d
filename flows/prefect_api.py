"""Whether a Prefect server answers at a URL; imports nothing of Prefect, which takes seconds."""

import httpx


def no_server_at(url: str) -> str:
    """What to type where none answers."""
    return (
        f"no Prefect server has its API at {url}; start one by `epsilonflow server start`, set PREFECT_API_URL to the"
        " whole URL of an API, such as http://127.0.0.1:4200/api, or unset it to run without a server."
    )


def is_prefect(health: httpx.Response) -> bool:
    """Whether a server of Prefect gave this answer about its health; a busy one says that it is unavailable."""
    try:
        return health.status_code == httpx.codes.SERVICE_UNAVAILABLE or health.json() is True
    except ValueError:  # a page
        return False


def is_nobody_at(url: str) -> bool:
    """Whether nobody listens at the URL; a busy server does, though it may take its time to answer."""
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=5.0)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return True
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return False


def answers_at(url: str) -> bool:
    """Whether a Prefect server has its API at the URL, or asks there who you are; a page is none, as without /api."""
    try:
        health = httpx.get(f"{url.rstrip('/')}/health", timeout=5.0)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return health.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN) or is_prefect(health)
