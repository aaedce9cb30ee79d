"""Files of a repository of the hub: read, in huggingface_hub's cache, and written.

The cache, the token (``HF_TOKEN``, ``hf auth login``) and the endpoint (``HF_ENDPOINT``) are
huggingface_hub's own. Without a network, or with ``HF_HUB_OFFLINE=1``, what the cache holds is
taken."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from blockwalk.system.paths import StrPath

_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:/([^@]+\.gguf))?(?:@(.+))?")


def without_password(text: str) -> str:
    """Return the text without the user and the password of addresses in it:
    ``https://user:password@host`` becomes ``https://host``."""
    return re.sub(r"(\w+://)[^/\s]*@", r"\1", text)


class HubName(NamedTuple):
    """A name of the hub: ``owner/name``, ``owner/name@revision`` or ``owner/name/file.gguf``."""

    repository: str
    gguf_file: str | None
    revision: str | None

    def download(self, *patterns: str) -> Path:
        """Return the folder that holds the repository's files, as :func:`download`."""
        return download(self.repository, self.revision, *patterns)


def hub_name(name: StrPath) -> HubName | None:
    """Return the parts of a name of the hub; None for what is on this machine, or no such name."""
    match = None if Path(name).exists() else _NAME.fullmatch(os.fspath(name))
    return match and HubName(*match.groups())


def file_of(name: StrPath, file: str) -> Path:
    """Return a file that is named by its path, or by the repository of the hub that holds it as
    ``file``."""
    named = hub_name(name)
    return named.download(file) / file if named else Path(name)


@lru_cache
def download(repo: str, revision: str | None, *files: str) -> Path:
    """Return the folder in the hub's cache that holds these files of a repository (patterns), those
    of them that there are; asked of the hub once in a process.

    Raises:
        ValueError: the hub has no such repository or revision, does not show it to this user, or
            cannot be reached while the cache does not have it.
    """
    from huggingface_hub import constants, errors, snapshot_download

    # It warns of a pattern that no file has, and patterns of both kinds of weights are tried.
    logging.getLogger("huggingface_hub._snapshot_download").setLevel(logging.ERROR)
    folders = [] if any("/" in name for name in files) else ["*/*"]
    endpoint = without_password(constants.ENDPOINT)
    page = f"{endpoint}/{repo}"
    try:
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=list(files), ignore_patterns=folders
            )
        )
    except errors.GatedRepoError:
        reason = (
            f"its owners ask who reads it: accept their terms at {page}, then run hf auth login,"
            " or set HF_TOKEN"
        )
    except errors.RepositoryNotFoundError:
        reason = (
            f"{endpoint} has none, or it is private: run hf auth login, or set HF_TOKEN; or give"
            " a folder"
        )
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {revision}; its branches and tags stand at {page}/tree/main"
    except errors.LocalEntryNotFoundError as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        why = (
            "HF_HUB_OFFLINE is set"
            if offline
            else f"{endpoint} cannot be reached: {without_password(str(error.__cause__))}"
        )
        reason = (
            f"{why}, and the cache does not have all of it; give the folder of a downloaded model"
        )
    except OSError as error:  # what else the hub answers
        reason = f"{endpoint} says: {without_password(str(error).partition(chr(10))[0])}"
    raise ValueError(f"model: there is no folder {repo}, and as a name of the hub: {reason}")


def create(repo: str) -> None:
    """Make a repository, private, where there is none of this name.

    Raises:
        ValueError: there is no token, it may not write there, or the hub cannot be reached.
    """
    _change(repo, lambda api: api.create_repo(repo, private=True, exist_ok=True))


def upload(repo: str, files: Mapping[str, Path]) -> str:
    """Write files into a repository as one commit, by their names there; return its page.

    Raises:
        ValueError: as :func:`create`.
    """
    from huggingface_hub import CommitOperationAdd, constants

    added = [CommitOperationAdd(name, path) for name, path in files.items()]
    _change(
        repo, lambda api: api.create_commit(repo, added, commit_message="Trained with Blockwalk")
    )
    return f"{without_password(constants.ENDPOINT)}/{repo}"


def _change(repo: str, request: Callable[[Any], object]) -> None:
    """Ask the hub to change a repository; every failure is one line."""
    from huggingface_hub import HfApi, get_token

    api = HfApi()
    try:
        if get_token() is None:
            raise ValueError("no token was found")
        request(api)
    except Exception as error:  # of huggingface_hub, and of the client that it is built on
        reason = without_password(str(error).partition("\n")[0])
        endpoint = without_password(str(api.endpoint))
        raise ValueError(
            f"{repo} cannot be written at {endpoint}: {reason}; run hf auth login, or set HF_TOKEN,"
            " for an account that may"
        ) from error
