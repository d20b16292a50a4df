"""`shardwright advise`: how often to save, and what that takes. Imports nothing heavy."""

import json
import re
from dataclasses import asdict
from typing import Annotated

import typer

from flows.line import GREEN, reader_may_leave
from flows.options import JsonOption
from flows.requests import parse_size
from reports.errors import RequestError
from reports.spell import spell_bytes, spell_seconds

# Unit of a time → seconds
SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# Unit of a count → how many
COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST = 1e18
_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*$")


def advise(
    mtbf: Annotated[str, typer.Option(metavar="TIME", help="Mean time between failures: 3h, 90min, 10800.", show_default=False)],
    save: Annotated[str, typer.Option(metavar="TIME", help="How long a save holds training: 30s.", show_default=False)],
    parameters: Annotated[str, typer.Option(metavar="COUNT", help="Parameters of the model: 7B, 7e9.", show_default=False)],
    budget: Annotated[str, typer.Option(metavar="SIZE", help="Storage for saves: 20TB.", show_default=False)] = "",
    recovery: Annotated[str, typer.Option(metavar="TIME", help="How long a recovery takes.")] = "0",
    detection: Annotated[str, typer.Option(metavar="TIME", help="How late a silent fault may be found.")] = "0",
    tokens_per_second: Annotated[float, typer.Option(min=0, help="For the tokens a day that saves and failures cost.")] = 0.0,
    as_json: JsonOption = False,
) -> int:
    """Say how often to save, and how much storage that takes: Young's and Daly's interval, 14 bytes a parameter for Adam with fp32 masters.

    Example: shardwright advise --mtbf 3h --save 30s --parameters 70B --budget 20TB
    """
    from validators.retention.advice import Asked
    from validators.retention.advice import advise as give_advice

    asked = Asked(
        _quantity("--mtbf", mtbf, SECONDS),
        _quantity("--save", save, SECONDS),
        round(_quantity("--parameters", parameters, COUNTS, least=1)),
        _size("--budget", budget),
        _quantity("--recovery", recovery, SECONDS, least=0),
        _quantity("--detection", detection, SECONDS, least=0),
        tokens_per_second,
    )
    advice = give_advice(asked)
    with reader_may_leave():
        if as_json:
            print(json.dumps(asdict(advice)))
            return GREEN
        print(f"save     every {spell_seconds(advice.young_seconds)} (Young); {spell_seconds(advice.daly_seconds)} (Daly)", end="")
        print(f"; {spell_seconds(advice.available_seconds)} with recovery counted; from the begin of a save to that of the next")
        print(f"cost     {advice.save_share:.1%} of the time in saves, {advice.rework_share:.1%} in work done again and recovery", end="")
        print(f": {advice.tokens_a_day:.3g} tokens a day" if tokens_per_second else "")
        print(f"storage  {spell_bytes(advice.save_nbytes)} a save, {spell_bytes(advice.weights_nbytes)} weights alone", end="")
        print(f"; the budget holds {advice.keep} beside the one being written" if budget else "")
        print(f"keep     at least {advice.needed}")
        for warning in advice.warnings:
            print(f"warning  {warning}")
    return GREEN


def _size(option: str, text: str) -> int:
    try:
        nbytes = parse_size(text) if text else None
    except ValueError as error:
        raise RequestError(str(error), where=f"{option} {text}", remedy="Write a size such as 20TB.") from None
    if nbytes == 0:
        raise RequestError("holds nothing", where=f"{option} {text}", remedy=f"Give a size such as 20TB, or leave {option} out.")
    return nbytes or 0


def _quantity(option: str, text: str, units: dict[str, float], least: float = 1e-9) -> float:
    match = _NUMBER.match(text)
    if match is None or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise RequestError("is no quantity", where=f"{option} {text}", remedy=f"Write a number, with {known} or nothing behind it.")
    value = float(match[1]) * units[match[2]]
    if not least <= value < _MOST:
        remedy = f"Give less than {_MOST:g}." if value >= _MOST else f"Give at least {least:g}." if least >= 1 else "Give more than 0."
        raise RequestError("is out of range", where=f"{option} {text}", remedy=remedy)
    return value
