"""Count the house, and fail on a circle, an arrow up, a room or file that is too big, or two classes of one name.

Fails, too, if a room has no fault in benchmarks/mutations.txt, or a fault there fits its file no longer.

A room is a module or package directly inside flwr_replay. An arrow is an import from one room in another, wherever it
stands in a file. The floors are those of .importlinter; an arrow up, or along a floor, runs against them. A circle is
of files, in one room or in several.

    python .ci/house.py SITE        # SITE: the folder in which the package lies as it is installed
"""

import ast
import configparser
import runpy
import sys
from collections import defaultdict
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).parents[1]
MOST = 4000  # lines of a room
LONGEST = 400  # lines of a file
PRODUCT = ("clients", "flwr_replay", "simulations", "strategies")
FOLDERS = ("benchmarks", "docs", *PRODUCT, "tests")


def lines(site, room):
    """Return how many lines a room has."""
    place = site / "flwr_replay" / room
    files = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def twice():
    """Return the names that several classes have, each with the classes' places."""
    places = defaultdict(list)
    for file in (file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    return [f"{name} in {' and '.join(where)}" for name, where in places.items() if len(where) > 1]


def unfit():
    """Return what is wrong with the list of faults by hand."""
    try:
        runpy.run_path(str(ROOT / "benchmarks/mutations.py"))["listed"]([""])
    except ValueError as error:
        return [str(error)]
    return []


def main():
    """Count, print and judge."""
    site = Path(sys.argv[1])
    sys.path.insert(0, str(site))
    imports = grimp.build_graph("flwr_replay", cache_dir=None)
    files = nx.DiGraph((a, b) for a in imports.modules for b in imports.find_modules_directly_imported_by(a))
    rooms = {name.split(".")[1] for name in imports.find_children("flwr_replay")}
    arrows = {(a.split(".")[1], b.split(".")[1]) for a, b in files.edges if a.count(".") and b.count(".")}
    arrows = {(a, b) for a, b in arrows if a != b}

    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    floors = contracts["importlinter:contract:floors"]["layers"].strip().split("\n")[::-1]
    floor = {room.strip(): number for number, rooms_there in enumerate(floors) for room in rooms_there.split("|")}
    up = sorted(f"{a} -> {b}" for a, b in arrows if a in floor and b in floor and floor[a] <= floor[b])
    circles = [sorted(circle) for circle in nx.strongly_connected_components(files) if len(circle) > 1]
    size = {room: lines(site, room) for room in sorted(rooms)}
    big = [f"{room} {count}" for room, count in size.items() if count > MOST]
    ours = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    long = [file for file in ours if len(file.read_text(encoding="utf-8").splitlines()) > LONGEST]

    print(f"{len(rooms)} rooms on {len(floors)} floors, {len(arrows)} arrows, {len(up)} up; {len(circles)} circles")
    print(f"{sum(size.values())} lines; the biggest rooms: ", end="")
    print(", ".join(f"{room} {size[room]}" for room in sorted(size, key=size.get, reverse=True)[:5]))
    faults = {"arrow up": up, "circle": circles, "class name used twice": twice(), "faults by hand": unfit()}
    faults |= {f"room of more than {MOST} lines": big, f"file of more than {LONGEST} lines": long}
    for fault, places in faults.items():
        for place in places:
            print(f"{fault}: {place}")
    sys.exit(1 if any(faults.values()) else 0)


main()
