"""Output formats that must be refused: wrong ones, and some that overflow a stack or never end."""

import json

from jaxctx.types import OutputFormat


def rule_chain(length: int) -> str:
    """Rules that each name the next one."""
    rules = [f"r{number}: r{number + 1}" for number in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


def doubling(depth: int) -> str:
    """A terminal of 2^depth letters."""
    terminals = [f"T{number}: T{number + 1} T{number + 1}" for number in range(depth)]
    return "\n".join(["start: T0", *terminals, f'T{depth}: "a"'])


def schema(**keywords: object) -> OutputFormat:
    return OutputFormat(json_schema=json.dumps(keywords))


# The field that is named, and a part of the message.
WRONG: dict[str, tuple[OutputFormat, str, str]] = {
    "no field": (OutputFormat(), "output_format.json_object", "must be true"),
    "false": (OutputFormat(json_object=False), "output_format.json_object", "must be true"),
    "not JSON": (OutputFormat(json_schema="{"), "output_format.json_schema", "not a JSON object"),
    "grammars behind the schema": (
        OutputFormat(json_schema='{}}, {"lark_grammar": "start: /a/"'),
        "output_format.json_schema",
        "not a JSON object",
    ),
    "an infinite number": (OutputFormat(json_schema='{"maximum": Infinity}'), "output_format.json_schema", ""),
    "no object": (OutputFormat(json_schema="[1]"), "output_format.json_schema", ""),
    "a keyword that is not supported": (schema(type="array", uniqueItems=True), "output_format.json_schema", "unique"),
    "a type that is none": (schema(type="list"), "output_format.json_schema", ""),
    "a reference to nothing": (OutputFormat(json_schema='{"$ref": "#/no"}'), "output_format.json_schema", ""),
    "a schema deep in itself": (
        OutputFormat(json_schema='{"items":' * 5000 + "{}" + "}" * 5000),
        "output_format.json_schema",
        "recursion",
    ),
    "a schema that only is itself": (OutputFormat(json_schema='{"$ref": "#"}'), "output_format.json_schema", ""),
    "a regex that is none": (OutputFormat(regex="[a-"), "output_format.regex", "unclosed"),
    "look-around": (OutputFormat(regex="(?=a)b"), "output_format.regex", "look-around"),
    "a regex that is deep": (OutputFormat(regex="(" * 4000 + "a" + ")" * 4000), "output_format.regex", ""),
    "no grammar": (OutputFormat(grammar="hello"), "output_format.grammar", ""),
    "a rule that is not there": (OutputFormat(grammar="start: other"), "output_format.grammar", "other"),
    "a token that is not there": (OutputFormat(grammar="start: <|nothing|>"), "output_format.grammar", "nothing"),
    "llguidance's own JSON": (
        OutputFormat(grammar='{"grammars": [{"json_schema": {}}]}'),
        "output_format.grammar",
        "",
    ),
}
CRASHING: dict[str, OutputFormat] = {
    "rules that overflow the stack": OutputFormat(grammar=rule_chain(4000)),
    "references that overflow the stack": schema(
        **{
            "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(1500)} | {"d1500": {"type": "string"}},
            "$ref": "#/$defs/d0",
        }
    ),
}
ENDLESS: dict[str, OutputFormat] = {
    "a conjunction of many": OutputFormat(grammar="start: T\nT: " + " & ".join(f"/.*{n}.*/" for n in range(1500))),
}
