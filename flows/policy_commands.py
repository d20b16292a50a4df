"""`shardwright policy`: the release policy as a file."""

from pathlib import Path
from typing import Annotated

import typer

from reports.errors import RequestError

policy_app = typer.Typer(name="policy", help="The release policy: required checks, limits, waivers.", rich_markup_mode=None)


@policy_app.callback()
def _root() -> None:
    pass


@policy_app.command()
def init(path: Annotated[Path, typer.Argument(help="Where to write it; must not exist.")] = Path("policy.yaml")) -> None:
    """Write a commented default policy, which changes nothing until it is edited.

    Example: shardwright policy init && shardwright gate release/ --policy policy.yaml
    """
    from validators.policy_file import default_policy_text

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(default_policy_text())
    except FileExistsError:
        raise RequestError("exists already", where=str(path), remedy="Name another file, or edit this one.") from None
    print(f"wrote {path}")
