"""Whether a run can push to the Hub: asked before it starts, not after hours of training."""

from __future__ import annotations

from typing import Any

from recipes.errors import mistake, one_line
from recipes.rules.training import pushed_to
from recipes.run import Settings

_INSTEAD = "leave push_to_hub out, and `hf upload` the folder afterwards"
_WRITE = "a token with write access, from https://huggingface.co/settings/tokens"
_MAY_CREATE = ("admin", "write", "contributor")  # `roleInOrg`


def require_hub(run: Settings) -> list[str]:
    """Notes on what the Hub does not tell. Raises `UserError` if it knows nobody by this token, or
    would refuse the repository.

    A run that does not push asks nothing.
    """
    if not run["push_to_hub"]:
        return []
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    api = HfApi(token=run["hub_token"])
    try:
        person = api.whoami()
        name = pushed_to(run)
        name = name if "/" in name else f"{person['name']}/{name}"
        try:
            api.auth_check(name, write=True)
        except RepositoryNotFoundError:  # Trainer will create it
            return _require_may_create(name, person)
        except HfHubHTTPError as error:
            if error.response.status_code != 403:
                raise
            what = f"the Hub does not let {person['name']} write to {name}"
            raise mistake("hub_model_id", what, f"a repository of your own, or {_WRITE}") from None
    except HfHubHTTPError as error:
        return [_not_told(error)]
    except (OfflineModeIsEnabled, HTTPError, OSError) as error:
        what = f"the Hub cannot be reached, and Trainer starts with it ({one_line(error)})"
        raise mistake("push_to_hub", what, f"check the network; or {_INSTEAD}") from None
    return []


def _require_may_create(name: str, person: dict[str, Any]) -> list[str]:
    owner, user = name.partition("/")[0], person["name"]
    roles = {organisation["name"]: organisation.get("roleInOrg") for organisation in person.get("orgs") or ()}
    if owner != user and owner not in roles:
        what = f"there is no repository {name}, and {user} cannot create it: {owner} is no organisation of theirs"
        raise mistake("hub_model_id", what, f"--hub_model_id {user}/{name.partition('/')[2]}")
    if roles.get(owner) not in (None, *_MAY_CREATE):
        what = f"there is no repository {name}, and {user} may only {roles[owner]} in {owner}"
        raise mistake("hub_model_id", what, f"--hub_model_id {user}/{name.partition('/')[2]}")
    role = ((person.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise mistake("push_to_hub", f"the token of {user} may only read", _WRITE)
    if role in ("fineGrained", None):
        return [f"the Hub does not tell whether this token may create {name}: the first push will"]
    return []


def _not_told(error: Any) -> str:
    """A note on an answer that says nothing of the run. Raises `UserError` for a refused token."""
    if error.response.status_code == 401:
        fix = "`hf auth login --force`, or another HF_TOKEN, which counts before a login"
        raise mistake("push_to_hub", f"the Hub refuses the token: {one_line(error)}", fix)
    return f"the Hub does not tell whether this run may push: {one_line(error)}"
