"""Options of commands that are lists, comma-separated."""

from collections.abc import Callable

import typer


def numbers(least: int = 1) -> Callable[[str], str]:
    """A callback that takes whole numbers from `least` on, or nothing."""

    def check(text: str) -> str:
        for each in text.split(",") if text else ():
            if not each.strip().isdecimal() or int(each) < least:
                raise typer.BadParameter(f"{each!r} is no whole number from {least} on")
        return text

    return check


def names(*known: str) -> Callable[[str], str]:
    """A callback that takes these names alone."""

    def check(text: str) -> str:
        for each in text.split(","):
            if each not in known:
                raise typer.BadParameter(f"{each!r} is none of {', '.join(known)}")
        return text

    return check
