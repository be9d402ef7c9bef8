"""The pages of the documentation: their code runs, prints what they say, and their links lead somewhere."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.M | re.S)
#: Whose code is run, and whose numbers are checked, by tests of their own.
ELSEWHERE = {"physics.md", "recording.md"}
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
WITH_CODE = [name for name in PAGES if BLOCK.search((DOCS / name).read_text(encoding="utf-8"))]
BETWEEN = "\x1e\n"


@pytest.mark.parametrize("name", [name for name in WITH_CODE if name not in ELSEWHERE])
def test_code(name, tmp_path):
    """All blocks of a page, in their order, in one process."""
    text = (DOCS / name).read_text(encoding="utf-8")
    script = [f"import sys\npage = {str(DOCS / name)!r}\nnamespace = {{'__name__': '__main__'}}"]
    for match in BLOCK.finditer(text):
        # As many empty lines in front as the block has on the page, so that errors name the line of the page.
        source = "\n" * text.count("\n", 0, match.start(1)) + match[1]
        script.append(f"exec(compile({source!r}, page, 'exec'), namespace)")
        script.append(f"sys.stdout.write({BETWEEN!r}); sys.stdout.flush()")
    (tmp_path / "page.py").write_text("\n".join(script), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "page.py"], capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(DOCS.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    checker = doctest.OutputChecker()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for match, printed in zip(BLOCK.finditer(text), done.stdout.split(BETWEEN), strict=False):
        if match[2] is not None:
            assert checker.check_output(match[2], printed, flags), f"{name} says:\n{match[2]}\nprinted:\n{printed}"


@pytest.mark.parametrize("name", PAGES)
def test_links(name):
    """Also where pages are read without the site: links are relative, and to files."""
    text = re.sub(r"```.*?```", "", (DOCS / name).read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
        assert ((DOCS / name).parent / target).exists(), target


def test_every_page_is_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w/-]+\.md", navigation)) == PAGES


def test_every_public_name_is_in_the_reference():
    stub = (DOCS.parent / "ceedtap" / "__init__.pyi").read_text(encoding="utf-8")
    public = set(re.findall(r"^from \S+ import \w+ as (\w+)$", stub, re.M))
    pages = "".join((DOCS / name).read_text(encoding="utf-8") for name in PAGES if name.startswith("reference"))
    documented = {*re.findall(r"^::: ceedtap\.(\w+)", pages, re.M), *re.findall(r"`([A-Z0-9_]+)`", pages)}
    missing = public - documented
    assert not missing, f"add '::: ceedtap.NAME' (constants: `NAME`) to a page in docs/reference: {sorted(missing)}"
