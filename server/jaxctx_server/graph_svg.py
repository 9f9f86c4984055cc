"""The graph of a session as a picture: an SVG that needs nothing else.

Used by `jaxctx-serve draw` and by the page of the HTTP server. Its look is in attributes, not in styles, which the
page's content security policy forbids; the page gives dark colours to the classes, which are the names in COLOURS.

A task is a box, named as the variable that it makes; a variable that no task makes is a box too. Words and colours say
how far they are. Boxes stand in columns to the right of all that they need. A column of more than ROWS boxes is broken
into several, and what does not fit into COLUMNS columns goes on below. Arrows lead from variables to the tasks that
need them, dashed ones from an output to the next output of the same call. They run between boxes, and cross none. The
engine of a task, why it was chosen, and why a task failed, is in the title of a box, which a browser shows where the
mouse points.

A session may have a million arrows, which take seconds to draw and which nobody could follow. The first MAX_ARROWS are
drawn, and above the boxes stands how many there are. All boxes are drawn, and stand as all arrows demand.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from jaxctx.types import GraphTask, VariableInfo

BOX_WIDTH, BOX_HEIGHT = 180, 48
LANE_WIDTH, LANE_HEIGHT = 60, 30  # between columns, between rows
ROWS, COLUMNS = 12, 8  # of boxes, at most
MAX_ARROWS = 10_000  # that are drawn, a megabyte
LANE_OFFSETS, LANE_OFFSET = 5, 4  # arrows in one lane run apart by so many steps of so much
TASK_CORNER, FUNCTION_CORNER, VARIABLE_CORNER = 6, 0, BOX_HEIGHT // 2  # radius: what kind of box it is
COLOURS = {
    "": "#fff",  # not known
    "idle": "#e5e7eb",
    "waiting": "#fef3c7",
    "started": "#bfdbfe",
    "done": "#bbf7d0",
    "failed": "#fecaca",
    "unset": "#fff",
    "set": "#bbf7d0",
}
TEXT_LOOK = 'font-family="monospace" font-size="13" fill="#111"'
ARROW_LOOK = 'fill="none" stroke="#6b7280"'
HEAD = f"""<marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">\
<path d="M1 1 7 4 1 7" {ARROW_LOOK}/></marker>
<rect class="background" width="100%" height="100%" fill="#fff"/>"""
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Point(NamedTuple):
    """A place in the picture, in pixels; of a box: its upper left corner."""

    x: int
    y: int


@dataclass(slots=True)
class _Graph:
    """Boxes and arrows, before they have a place. Boxes are named by the id of their variable."""

    boxes: dict[str, str] = field(default_factory=dict)  # the SVG of each
    task_depths: dict[str, int] = field(default_factory=dict)  # the longest way to each task, in boxes before it
    variable_depths: dict[str, int] = field(default_factory=dict)  # the same of variables that no task makes
    is_dashed: dict[tuple[str, str], bool] = field(default_factory=dict)  # of each arrow that is drawn, from and to
    arrows: int = 0  # all of them, drawn or not


def graph_svg(tasks: Sequence[GraphTask], variables: Iterable[VariableInfo] = ()) -> str:
    """The picture of these tasks; the same tasks give the same picture.

    Variables that are not given are named by the first characters of their ids.
    """
    known = {variable.variable_id: variable for variable in variables}
    graph = _Graph()
    _add_tasks(graph, tasks, known)
    _add_variables(graph, tasks, known)
    corners = _place_boxes({**graph.variable_depths, **graph.task_depths})
    right = max((corner.x for corner in corners.values()), default=0)
    bottom = max((corner.y for corner in corners.values()), default=0)
    view_box = f"0 0 {right + BOX_WIDTH + LANE_WIDTH} {bottom + BOX_HEIGHT + LANE_HEIGHT}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view_box}" {TEXT_LOOK}><title>{len(tasks)} tasks</title>',
        HEAD,
    ]
    if graph.arrows > len(graph.is_dashed):
        words = f"{len(graph.is_dashed):,} of {graph.arrows:,} arrows are drawn"
        lines.append(f'<text x="{LANE_WIDTH}" y="{LANE_HEIGHT - 10}">{words}</text>')
    for (source, target), is_dashed in graph.is_dashed.items():
        dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
        lines.append(
            f'<path d="{_arrow_path(corners[source], corners[target])}"{dashes} {ARROW_LOOK} marker-end="url(#end)"/>'
        )
    for name, (x, y) in corners.items():
        # Each box is a picture of its own, so that a long name is cut off at its border.
        lines.append(f'<svg x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}">{graph.boxes[name]}</svg>')
    return "\n".join([*lines, "</svg>\n"])


def _add_tasks(graph: _Graph, tasks: Sequence[GraphTask], known: Mapping[str, VariableInfo]) -> None:
    """Add a box for each task, and the arrows that lead to it."""
    call_numbers: dict[str, int] = {}
    last_outputs: dict[str, str] = {}  # by call
    for task in tasks:
        call_number = call_numbers.setdefault(task.call_id, len(call_numbers) + 1)
        previous = last_outputs.get(task.call_id)
        arrows = {} if previous is None else {previous: True}
        arrows |= dict.fromkeys(task.inputs, False)
        graph.task_depths[task.output] = 1 + max((graph.task_depths.get(each, 0) for each in arrows), default=0)
        graph.arrows += len(arrows)
        drawn = itertools.islice(arrows.items(), MAX_ARROWS - len(graph.is_dashed))
        graph.is_dashed.update({(source, task.output): is_dashed for source, is_dashed in drawn})
        last_outputs[task.call_id] = task.output
        graph.boxes[task.output] = _box(
            task.output,
            known.get(task.output),
            kind=task.function or f"call {call_number}",
            state=task.phase.value,
            note=f"on {task.engine_id}: {task.why}" if task.engine_id else "",
            corner=FUNCTION_CORNER if task.function else TASK_CORNER,
        )


def _add_variables(graph: _Graph, tasks: Sequence[GraphTask], known: Mapping[str, VariableInfo]) -> None:
    """Add a box for each variable that no task makes: one column before the first task that needs it."""
    depths = graph.variable_depths
    for task in tasks:
        depth = graph.task_depths[task.output] - 1
        for source in task.inputs:
            if source not in graph.task_depths:
                depths[source] = min(depths.get(source, depth), depth)
    for source in depths:
        variable = known.get(source)
        state = "" if variable is None else variable.state.value
        graph.boxes[source] = _box(source, variable, kind="variable", state=state, note="", corner=VARIABLE_CORNER)


def _place_boxes(depths: Mapping[str, int]) -> dict[str, Point]:
    """The corner of each box, by how many boxes come before it."""
    layers: dict[int, list[str]] = defaultdict(list)
    for name, depth in depths.items():
        layers[depth].append(name)
    columns: list[list[str]] = []
    for depth in sorted(layers):
        layer = layers[depth]
        columns += [layer[start : start + ROWS] for start in range(0, len(layer), ROWS)]
    corners: dict[str, Point] = {}
    top = 0  # the first row of a band of columns
    for start in range(0, len(columns), COLUMNS):
        band = columns[start : start + COLUMNS]
        rows = max(len(column) for column in band)
        for number, column in enumerate(band):
            first_row = top + (rows - len(column)) // 2
            for row, name in enumerate(column, first_row):
                corners[name] = Point(
                    LANE_WIDTH + number * (BOX_WIDTH + LANE_WIDTH), LANE_HEIGHT + row * (BOX_HEIGHT + LANE_HEIGHT)
                )
        top += rows + 1
    return corners


def _arrow_path(source: Point, target: Point) -> str:
    """From one box to another: a curve to the next column, and to all others a path along lanes.

    In a lane, arrows to different targets run apart.
    """
    x, y = source.x + BOX_WIDTH, source.y + BOX_HEIGHT * 2 // 3
    to_x, to_y = target.x, target.y + BOX_HEIGHT // 3
    if to_x == x + LANE_WIDTH:
        middle = x + LANE_WIDTH // 2
        return f"M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"
    offset = (target.x + target.y) // (BOX_HEIGHT + LANE_HEIGHT) % LANE_OFFSETS * LANE_OFFSET
    return f"M{x} {y}H{x + 8 + offset}V{source.y + BOX_HEIGHT + 6 + offset}H{to_x - 28 + offset}V{to_y}H{to_x}"


def _box(variable_id: str, variable: VariableInfo | None, *, kind: str, state: str, note: str, corner: int) -> str:
    """A box: a name in bold, what it is and how far, and in its title what more there is to say."""
    name, error = variable_id[:8], ""
    if variable is not None:
        name, error = variable.name or name, variable.error_message
    title = "\n".join(part for part in (name, variable_id, note, error) if part)
    words = f"{kind}, {state}" if state else kind
    rect = (
        f'<rect x="1" y="1" width="{BOX_WIDTH - 2}" height="{BOX_HEIGHT - 2}" rx="{corner}" '
        f'class="{state}" fill="{COLOURS[state]}" stroke="#374151"/>'
    )
    bold = f'<text x="14" y="20" font-weight="bold">{_xml_text(name)}</text>'
    return f'<title>{_xml_text(title)}</title>{rect}{bold}<text x="14" y="38">{_xml_text(words)}</text>'


def _xml_text(text: str) -> str:
    """The text as XML; characters that XML cannot have are replaced."""
    return escape(NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text))
