"""Graphs of sessions as SVG: well-formed whatever the names, every box and arrow in its place, the same each time."""

import itertools
import random
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest

from jaxctx.types import GraphTask, TaskPhase, VariableInfo, VariableState
from jaxctx_server.graph_svg import COLOURS, MAX_ARROWS, graph_svg

SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]  # left, top, right, bottom


def task(call: str, made: str, *inputs: str, phase: TaskPhase = TaskPhase.DONE, **fields: str) -> GraphTask:
    return GraphTask(call_id=call, output=made, inputs=inputs, phase=phase, **fields)


def variable(variable_id: str, name: str, state: VariableState = VariableState.SET) -> VariableInfo:
    return VariableInfo(variable_id=variable_id, name=name, state=state, text="")


def chain(tasks: int) -> list[GraphTask]:
    return [task(f"c{i}", f"v{i}", f"v{i - 1}") for i in range(tasks)]


def map_reduce(tasks: int) -> list[GraphTask]:
    maps = [task(f"c{i}", f"v{i}", f"x{i}", "all") for i in range(tasks - 1)]
    return [*maps, task("reduce", "sum", *(each.output for each in maps))]


def one_call(tasks: int) -> list[GraphTask]:
    return [task("c", f"v{i}", "x") for i in range(tasks)]


def anything(tasks: int) -> list[GraphTask]:
    draw = random.Random(tasks)
    made: list[GraphTask] = []
    for i in range(tasks):
        there = [each.output for each in made] + ["x", "y"]
        made.append(
            task(f"c{draw.randrange(tasks)}", f"v{i}", *draw.sample(there, draw.randint(0, min(3, len(there)))))
        )
    return made


def boxes_of(picture: ElementTree.Element) -> dict[str, Box]:
    """By the id of the variable, which is in the second line of the title."""
    found = {}
    for each in picture.findall(f"{SVG}svg"):
        x, y, width, height = (float(each.attrib[name]) for name in ("x", "y", "width", "height"))
        found[str(each.findtext(f"{SVG}title")).split("\n")[1]] = (x, y, x + width, y + height)
    return found


def points_of(path: str) -> list[tuple[float, float]]:
    """Of what a path passes, close together."""
    points: list[tuple[float, float]] = []
    for command, numbers in re.findall(r"([MHVC])([-\d. ]+)", path):
        values = [float(each) for each in numbers.split()]
        if command == "M":
            points.append((values[0], values[1]))
            continue
        x, y = points[-1]
        ends = {"H": (values[0], y), "V": (x, values[0])}
        a, b, c = (
            ((x, y), ends[command], ends[command]) if command in ends else zip(values[::2], values[1::2], strict=True)
        )
        for t in (n / 100 for n in range(1, 101)):
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
            points.append(tuple(sum(w * p[i] for w, p in zip(weights, ((x, y), a, b, c), strict=True)) for i in (0, 1)))
    return points


@pytest.mark.parametrize("shape", [chain, map_reduce, one_call, anything])
@pytest.mark.parametrize("tasks", [1, 2, 7, 25, 60])
def test_boxes_and_arrows_are_in_the_picture_and_in_nobodys_way(shape, tasks: int) -> None:
    graph: Sequence[GraphTask] = shape(tasks)
    picture = ElementTree.fromstring(graph_svg(graph))
    left, top, width, height = map(float, picture.attrib["viewBox"].split())
    boxes = boxes_of(picture)
    assert boxes.keys() == {name for each in graph for name in (*each.inputs, each.output)}
    for a, b in itertools.combinations(boxes.values(), 2):
        assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]
    assert all(left < x < x2 < width and top < y < y2 < height for x, y, x2, y2 in boxes.values())
    paths = picture.findall(f"{SVG}path")
    needs = {(source, each.output) for each in graph for source in each.inputs}
    continued = {
        (before.output, after.output)
        for call in {each.call_id for each in graph}
        for before, after in itertools.pairwise([each for each in graph if each.call_id == call])
    }
    assert len(paths) == len(needs | continued)
    reached = set()
    for path in paths:
        points = points_of(path.attrib["d"])
        (start,) = [name for name, (_, y, x2, y2) in boxes.items() if points[0][0] == x2 and y < points[0][1] < y2]
        (end,) = [name for name, (x, y, _, y2) in boxes.items() if points[-1][0] == x and y < points[-1][1] < y2]
        reached.add((start, end))
        assert all(left < x < width and top < y < height for x, y in points)
        for x, y in points[1:-1]:
            assert not any(x1 < x < x2 and y1 < y < y2 for x1, y1, x2, y2 in boxes.values())
    assert reached == needs | continued
    assert sum("stroke-dasharray" in each.attrib for each in paths) == len(continued - needs)
    if tasks == 60:  # it may be seen as a whole
        assert max(width, height) < 2400


@pytest.mark.parametrize("tasks", [7, 60])
def test_what_is_needed_stands_before_what_needs_it(tasks: int) -> None:
    graph = anything(tasks)
    boxes = boxes_of(ElementTree.fromstring(graph_svg(graph)))
    for each in graph:
        for source in each.inputs:
            (x, y, *_), (to_x, to_y, *_) = boxes[source], boxes[each.output]
            assert x < to_x or y < to_y


def test_states_are_words_and_colours() -> None:
    graph = [task(f"c{i}", f"v{i}", phase=phase) for i, phase in enumerate(TaskPhase)]
    graph += [task("s", "v", *(state.value for state in VariableState), function="strip")]
    picture = graph_svg(graph, [variable(state.value, state.value, state) for state in VariableState])
    root = ElementTree.fromstring(picture)
    words = {str(box.findall(f"{SVG}text")[1].text): box.find(f"{SVG}rect") for box in root.findall(f"{SVG}svg")}
    assert [each for each in words if each.startswith("call")] == [
        f"call {i}, {p.value}" for i, p in enumerate(TaskPhase, 1)
    ]
    assert {each for each in words if each.startswith("variable")} == {f"variable, {s.value}" for s in VariableState}
    assert "strip, done" in words
    for each, rect in words.items():
        assert rect is not None
        assert rect.attrib["fill"] == COLOURS[each.split(", ")[1]]


def test_the_engine_and_why_are_told() -> None:
    (box,) = ElementTree.fromstring(graph_svg([task("c", "v" * 32, engine_id="e1", why="least impact")])).findall(
        f"{SVG}svg"
    )
    assert box.findtext(f"{SVG}title") == f"{'v' * 8}\n{'v' * 32}\non e1: least impact"


def test_why_a_task_failed_is_told() -> None:
    failed = VariableInfo(variable_id="v", name="said", state=VariableState.FAILED, text="", error_message="late")
    (box,) = ElementTree.fromstring(graph_svg([task("c", "v", phase=TaskPhase.FAILED)], [failed])).findall(f"{SVG}svg")
    assert box.findtext(f"{SVG}title") == "said\nv\nlate"


def test_names_are_bold() -> None:
    name, words = ElementTree.fromstring(graph_svg([task("c", "v")])).findall(f"{SVG}svg/{SVG}text")
    assert name.get("font-weight") == "bold"
    assert words.get("font-weight") is None


def test_a_content_security_policy_without_inline_styles_changes_nothing() -> None:
    picture = graph_svg([task("c", "a"), task("c", "b", "a")], [variable("a", "first")])
    assert "style" not in picture


@pytest.mark.parametrize(
    "name",
    ["</text><script>alert(1)</script>", '" onload="x', "a&amp;b]]>", "\x00\x1b[31m\ufffe\x7f", "字" * 80, "‮abc", " "],
)
def test_names_and_texts_are_only_text(name: str) -> None:
    graph = [task("c", "v", "x", engine_id=name, why=name), task("s", "w", "v", function=name)]
    root = ElementTree.fromstring(graph_svg(graph, [variable("v", name), variable("x", name)]))
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {
        "svg",
        "title",
        "style",
        "marker",
        "path",
        "rect",
        "text",
    }
    assert not any(attribute.startswith("on") for each in root.iter() for attribute in each.attrib)
    shown = re.sub("[\x00-\x1f\ufffe]", "\N{REPLACEMENT CHARACTER}", name)
    assert [str(box.find(f"{SVG}text").text) for box in root.findall(f"{SVG}svg")][:2] == [shown, shown]


def test_of_very_many_arrows_the_first_are_drawn_and_it_is_said_so() -> None:
    """All boxes are there, each where it would be with all arrows: one on the right of another is behind it."""
    given = [f"x{i}" for i in range(100)]
    graph = [task(f"c{i}", f"v{i}", *given, f"v{i - 1}" if i else "late") for i in range(MAX_ARROWS // 100 + 5)]
    picture = graph_svg(graph)
    root = ElementTree.fromstring(picture)
    assert len(root.findall(f"{SVG}path")) == MAX_ARROWS
    assert len(picture) < 3_000_000
    arrows = sum(len(each.inputs) for each in graph)
    assert [each.text for each in root.findall(f"{SVG}text")] == [f"{MAX_ARROWS:,} of {arrows:,} arrows are drawn"]
    boxes = boxes_of(root)
    assert boxes.keys() == {*given, "late", *(each.output for each in graph)}
    for before, after in itertools.pairwise(each.output for each in graph):
        assert boxes[before][0] < boxes[after][0] or boxes[before][1] < boxes[after][1]


def test_nothing_is_said_of_arrows_that_are_all_drawn() -> None:
    root = ElementTree.fromstring(graph_svg(map_reduce(60)))
    assert root.findall(f"{SVG}text") == []


def test_nothing_is_a_picture_too() -> None:
    root = ElementTree.fromstring(graph_svg([]))
    assert root.findtext(f"{SVG}title") == "0 tasks"
    assert all(float(each) >= 0 for each in root.attrib["viewBox"].split())


def test_the_same_graph_gives_the_same_picture() -> None:
    assert graph_svg(anything(40)) == graph_svg(anything(40))


def test_a_graph_out_of_order_ends_all_the_same() -> None:
    """No server tells one."""
    graph = [task("a", "v", "w"), task("b", "w", "v"), task("c", "x", "x")]
    assert boxes_of(ElementTree.fromstring(graph_svg(graph))).keys() == {"v", "w", "x"}
