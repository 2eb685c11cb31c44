"""Run random fault schedules on a simulated fleet, replay one, or search for planted faults."""

import argparse
import os
import sys
import time
from collections import Counter

from tests.simulation.campaign import (
    Campaign,
    Played,
    chosen,
    command,
    play_all,
    replay,
    shrink,
)
from tests.simulation.plants import PLANTS
from tests.simulation.schedule import MAKERS, USUAL
from tests.simulation.seams import Seams
from tests.simulation.soak import grown, soak

STORIES = 40


def main() -> int:
    """Run what the arguments ask for; returns 1 if an invariant was broken."""
    args = _arguments()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of names then iterate in the same order in every process.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    if args.plant == "all":
        return _search_plants(args)
    if args.soak:
        return _soak(args.soak)
    if args.seed is not None:
        schedule = chosen(args.seed, args.keep, _kinds(args.kinds))
        played = replay(schedule, plant=args.plant)
        if args.shrink and played.violation:
            played = shrink(schedule, played.violation, plant=args.plant)
        _report_schedule(played, args)
        return int(bool(played.violation))
    campaign = _campaign(args)
    _report(campaign, args)
    return int(bool(campaign.failures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument(
        "--schedules", type=int, default=1000, help="number of schedules to run (default: 1000)"
    )
    parser.add_argument(
        "--hours",
        type=float,
        default=0.0,
        help="run for this many hours instead of a number of schedules",
    )
    parser.add_argument(
        "--first", type=int, default=0, help="seed of the first schedule (default: 0)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="number of processes (default: one per core)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="run only the schedule of this seed, and print its events if it fails",
    )
    parser.add_argument(
        "--keep", help="with --seed: run only these actions of the schedule, e.g. 0,2,5"
    )
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="with --seed: if it fails, reduce it to as few actions as possible",
    )
    parser.add_argument(
        "--plant",
        default="",
        help=f"break the product on purpose; one of: all, {', '.join(PLANTS)}",
    )
    parser.add_argument(
        "--kinds", default="", help="comma-separated kinds of faults to use; -KIND excludes one"
    )
    parser.add_argument(
        "--soak",
        type=int,
        default=0,
        help="run one fleet for this many epochs and switches, and print its memory use",
    )
    parser.add_argument(
        "--all-failures", action="store_true", help="do not stop at the first failure"
    )
    parser.add_argument("--digests", action="store_true", help="print the digest of each schedule")
    parser.add_argument(
        "--table",
        action="store_true",
        help="print the number of schedules by kind of fault, and of those in which it took effect",
    )
    return parser.parse_args()


def _campaign(args: argparse.Namespace) -> Campaign:
    campaign = Campaign()
    ends_s = time.monotonic() + 3600 * args.hours
    count = args.schedules if not args.hours else 1 << 40
    shown_s = time.monotonic()
    seeds = range(args.first, args.first + count)
    for played in play_all(seeds, jobs=args.jobs, plant=args.plant, kinds=_kinds(args.kinds)):
        campaign.add(played)
        if args.digests:
            print(f"seed {played.schedule.seed}: {played.digest}")
        if played.violation and not args.all_failures:
            break
        if args.hours and time.monotonic() > ends_s:
            break
        if time.monotonic() > shown_s + 30:
            shown_s = time.monotonic()
            print(f"{campaign.schedules} schedules", file=sys.stderr, flush=True)
    return campaign


def _kinds(text: str) -> tuple[str, ...]:
    """The kinds of faults that `--kinds` names."""
    names = [name for name in text.split(",") if name]
    excluded = {name[1:] for name in names if name.startswith("-")}
    wanted = [name for name in names if not name.startswith("-")] or USUAL
    return tuple(name for name in wanted if name not in excluded)


def _report(campaign: Campaign, args: argparse.Namespace) -> None:
    for violation, failures in sorted(campaign.failures.items()):
        seeds = ", ".join(str(one.schedule.seed) for one in failures[:20])
        print(f"\n{violation}: {len(failures)} of {campaign.schedules} schedules (seeds {seeds})")
        for text, count in Counter(one.text[:160] for one in failures).most_common(8):
            print(f"  {count} x {text}")
        _report_schedule(shrink(failures[0].schedule, violation, plant=args.plant), args)
    if args.table or args.all_failures:
        print(f"\n{'fault':24} {'schedules':>9} {'took effect':>12} {'broke an invariant':>19}")
        for kind in MAKERS:
            print(
                f"{kind:24} {campaign.kinds[kind]:9} {campaign.effects[kind]:12} "
                f"{campaign.failed_kinds[kind]:19}"
            )
    seldom = [
        f"{kind} {campaign.effects[kind]} of {num}"
        for kind, num in sorted(campaign.kinds.items())
        if 2 * campaign.effects[kind] < num
    ]
    print(f"\nfaults that took effect in less than half of their schedules: {seldom or 'none'}")
    num = max(1, campaign.schedules)
    per_minute = 60 * num / max(campaign.cpu_s, 1e-9)
    print(
        f"\n{campaign.schedules} schedules, {sum(map(len, campaign.failures.values()))} broke an "
        f"invariant; {campaign.events} events, {campaign.virtual_s / 3600:.1f} simulated hours, "
        f"{campaign.steps} steps, {campaign.epochs} epochs, {campaign.plans} plans, "
        f"{campaign.switches} switches; {1000 * campaign.cpu_s / num:.0f} ms a schedule, "
        f"{per_minute:.0f} a minute and core"
    )


def _report_schedule(played: Played, args: argparse.Namespace) -> None:
    if not played.violation:
        print(f"seed {played.schedule.seed}: every invariant held ({played.digest})")
        return
    print(f"\n{played.schedule.num_workers} workers, 2 balancers; what happened (* is a fault):")
    lines = played.story
    if len(lines) > STORIES:
        faults = [line for line in lines[: -STORIES // 2] if "  * " in line]
        lines = (*faults, "    ...", *lines[-STORIES // 2 :])
    for line in lines:
        print(line)
    again = command(played, plant=args.plant, kinds=args.kinds)
    print(f"\nagain: {again}   (digest {played.digest})")


def _soak(count: int) -> int:
    """Run one fleet for long; show what is in memory, and judge whether that grew."""
    print(
        f"{'epochs':>7} {'switches':>8} {'terms':>6} {'hours':>6} {'MiB':>7} {'objects':>8} tasks"
    )
    samples = []
    steps = soak(
        Seams(), epochs=count, switches=count, terms=count // 10, every=max(1, count // 40)
    )
    for at in steps:
        hours = at.virtual_s / 3600
        print(
            f"{at.epochs:7} {at.switches:8} {at.terms:6} {hours:6.2f} {at.resident_mib:7.1f} "
            f"{at.objects:8} {at.tasks}",
            flush=True,
        )
        samples.append(at)
    fault = samples[-1].violation or grown(samples)
    print(fault or "every invariant held, and nothing grew")
    return int(bool(fault))


def _search_plants(args: argparse.Namespace) -> int:
    """Play until each planted fault is found; a table."""
    missed = 0
    print(f"{'planted fault':28} {'schedules until found':>22}  found as")
    for name in PLANTS:
        number, found = 0, None
        seeds = range(args.first, args.first + args.schedules)
        kinds = PLANTS[name].kinds
        for played in play_all(seeds, jobs=args.jobs, plant=name, kinds=kinds, batch=4):
            number += 1
            if played.violation:
                found = played
                break
        missed += found is None
        outcome = found.text[:90] if found is not None else "NOT FOUND"
        print(f"{name:28} {number:22}  {outcome}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
