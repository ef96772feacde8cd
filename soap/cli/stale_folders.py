"""Which folders stale runs may save to."""

from __future__ import annotations

import argparse
from pathlib import Path

from soap.cli.command import UsageError


def check_folders(args: argparse.Namespace) -> None:
    """UsageError in one line if ``--save`` and ``--resume`` contradict each other, or something else is in the folder."""
    if args.save is not None and args.resume is not None and Path(args.save).resolve() != Path(args.resume).resolve():
        raise UsageError("--save beside --resume; expected --resume alone: a stale run goes on in its own folder")
    if args.save_every is not None and args.save is None and args.resume is None:
        raise UsageError("--save-every without --save; add --save DIR")
    place = Path(args.save) if args.save is not None and args.resume is None else None
    if place is not None and place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"--save {args.save}: something is there; expected an empty folder, or --resume {args.save} to go on from it")
