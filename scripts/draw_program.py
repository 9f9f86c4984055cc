#!/usr/bin/env python3
"""A program as a picture: what a session's graph tells, as an SVG that stands alone, on standard output.

    scripts/draw_program.py SESSION_ID [HOST:PORT] > program.svg

A task is a box, named as the variable that it makes, and so is a variable that somebody sets; words and colours say
how far they are. Boxes stand in columns behind all that they need; long columns are broken, and what has no room at the
side goes on below. Arrows lead from texts to what needs them, dashed ones from an output to the next of its call. They
run between boxes, and cross none. Engines, why they were chosen, and why a task failed, is what a browser shows where
it points.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import jaxctx
from jaxctx.types import GraphTask, VariableInfo

WIDTH, HEIGHT, BESIDE, BELOW = 180, 48, 60, 30  # of a box, and of the lanes between boxes
ROWS, COLUMNS = 12, 8  # of boxes, at most
COLOURS = {"idle": "#e5e7eb", "waiting": "#fef3c7", "started": "#bfdbfe", "done": "#bbf7d0", "failed": "#fecaca"}
COLOURS |= {"unset": "#fff", "set": "#bbf7d0", "": "#fff"}
HEAD = """<style>text{font:13px monospace;fill:#111}rect{stroke:#374151}path{fill:none;stroke:#6b7280}</style>
<marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"><path d="M1 1 7 4 1 7"/></marker>
<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>"""
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def svg(graph: Sequence[GraphTask], variables: Iterable[VariableInfo] = ()) -> str:
    """The picture of these tasks, and the same for the same. Variables that are not given are named by their ids."""
    known = {each.variable_id: each for each in variables}
    calls: dict[str, list[str]] = {}  # the outputs of each
    depths: dict[str, int] = {}  # how many boxes come before each, at the most
    given: dict[str, int] = {}  # the same of variables that no task makes
    arrows: dict[tuple[str, str], str] = {}
    boxes: dict[str, str] = {}
    for task in graph:
        before = calls.setdefault(task.call_id, [])[-1:]
        depths[task.output] = 1 + max((depths.get(each, 0) for each in (*task.inputs, *before)), default=0)
        arrows |= {(each, task.output): ' stroke-dasharray="5 4"' for each in before}
        arrows |= {(each, task.output): "" for each in task.inputs}
        calls[task.call_id].append(task.output)
        what = task.function or f"call {list(calls).index(task.call_id) + 1}"
        note = f"on {task.engine_id}: {task.why}" if task.engine_id else ""
        boxes[task.output] = _box(task.output, known, what, task.phase.value, note, 0 if task.function else 6)
    for source, target in arrows:
        if source not in depths:
            given[source] = min(depths[target] - 1, given.get(source, len(graph)))
            state = known[source].state.value if source in known else ""
            boxes[source] = _box(source, known, "variable", state, "", HEIGHT // 2)
    places = _places(given | depths)
    right, bottom = (max((place[axis] for place in places.values()), default=0) for axis in (0, 1))
    size = f"0 0 {right + WIDTH + BESIDE} {bottom + HEIGHT + BELOW}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}"><title>{len(graph)} tasks</title>', HEAD]
    for (source, target), dashes in arrows.items():
        parts.append(f'<path d="{_way(places[source], places[target])}"{dashes} marker-end="url(#end)"/>')
    for each, (x, y) in places.items():  # each in a picture of its own, outside of which no name is seen
        parts.append(f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}">{boxes[each]}</svg>')
    return "\n".join([*parts, "</svg>\n"])


def _places(depths: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The upper left corner of each box."""
    layers: dict[int, list[str]] = defaultdict(list)
    for each, depth in depths.items():
        layers[depth].append(each)
    columns = [layer[at : at + ROWS] for _, layer in sorted(layers.items()) for at in range(0, len(layer), ROWS)]
    places, top = {}, 0
    for start in range(0, len(columns), COLUMNS):
        band = columns[start : start + COLUMNS]
        rows = max(map(len, band))
        for number, column in enumerate(band):
            for row, each in enumerate(column, top + (rows - len(column)) // 2):
                places[each] = (BESIDE + number * (WIDTH + BESIDE), BELOW + row * (HEIGHT + BELOW))
        top += rows + 1
    return places


def _way(source: tuple[int, int], target: tuple[int, int]) -> str:
    """To the next column a curve, else along lanes, in which those to other targets and from others run apart."""
    (x, y), (to_x, to_y) = (source[0] + WIDTH, source[1] + HEIGHT * 2 // 3), (target[0], target[1] + HEIGHT // 3)
    if to_x == x + BESIDE:
        return f"M{x} {y}C{x + BESIDE // 2} {y} {x + BESIDE // 2} {to_y} {to_x} {to_y}"
    apart = sum(target) // (HEIGHT + BELOW) % 5 * 4
    return f"M{x} {y}H{x + 8 + apart}V{source[1] + HEIGHT + 6 + apart}H{to_x - 28 + apart}V{to_y}H{to_x}"


def _box(variable_id: str, known: Mapping[str, VariableInfo], what: str, state: str, note: str, corner: int) -> str:
    variable = known.get(variable_id)
    name, error = (variable.name or variable_id[:8], variable.error_message) if variable else (variable_id[:8], "")
    texts = (name, f"{what}, {state}" if state else what, "\n".join(filter(None, [name, variable_id, note, error])))
    name, words, title = (escape(NOT_XML.sub("\N{REPLACEMENT CHARACTER}", each)) for each in texts)
    rect = f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="{corner}" fill="{COLOURS[state]}"/>'
    bold = f'<text x="14" y="20" style="font-weight:bold">{name}</text>'
    return f'<title>{title}</title>{rect}{bold}<text x="14" y="38">{words}</text>'


def drawn(target: str, session_id: str) -> str:
    """The picture of a session that lifecycle."""
    with jaxctx.Client(target) as client:
        session = client.session(session_id)
        graph, variables = session.graph(), [each.look() for each in session.variables()]
    return svg(graph, variables)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session_id")
    parser.add_argument("target", nargs="?", default="127.0.0.1:50051")
    chosen = parser.parse_args()
    print(drawn(chosen.target, chosen.session_id), end="")
