"""Docstrings of ceedtap as the documentation site wants them: Markdown for roles, literals and examples."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`([^`]+)`")


class Markdown(griffe.Extension):
    """Rewrites roles of Sphinx to references, double backquotes to single ones, and examples to blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _markdown(obj.docstring.value, obj)


def _markdown(text: str, obj: griffe.Object) -> str:
    lines: list[str] = []
    indent = ""
    code = section = False
    for line in text.splitlines():
        # A section "Examples" is made code by the parser.
        section = line == "Examples:" or (section and (line.startswith(" ") or not line))
        example = not section and line.lstrip().startswith((">>>", "..."))
        if example and not code:
            indent = line[: len(line) - len(line.lstrip())]
            lines += ["", indent + "```pycon"]
        elif code and not line.strip():
            lines.append(indent + "```")
        code = example or (code and bool(line.strip()))
        if code or section:
            lines.append(re.sub(r"\s*# doctest:.*", "", line))
        else:
            line = _ROLE.sub(lambda match: _reference(match[1], obj), line)
            lines.append(line.replace("``", "`"))
    if code:
        lines.append(indent + "```")
    return "\n".join(lines)


def _reference(target: str, obj: griffe.Object) -> str:
    """A link where the name is documented, else the name."""
    title = target.removeprefix("ceedtap.")
    if target.startswith("ceedtap."):
        name = target
    elif target[:1].isupper() or "." in target:
        name = f"ceedtap.{target}"
    else:
        owner = obj if obj.is_class or obj.parent is None else obj.parent
        name = f"{owner.path}.{target}"
    return f'<autoref identifier="{name}" optional><code>{title}</code></autoref>'
