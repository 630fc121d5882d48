"""What a contributor is told: pre-commit's checks are CI's, and the issue templates can be used."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support.mounts.mounting import ROOT

TEMPLATES: Final = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
HOUSE_RULES: Final = (
    "tests/test_tidy.py",
    "tests/test_tidy_tests.py",
    "tests/core/test_named_paths.py",
)


def test_pre_commit_runs_what_lint_runs_and_the_house_rules() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    hooks = re.findall(r"^        entry: (.+)$", config, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.+\n)+)", makefile, re.MULTILINE)
    lint = [line.strip().replace("$(VENV)", ".venv") for line in recipe.splitlines()]
    assert hooks == [*lint, f".venv/bin/pytest -q {' '.join(HOUSE_RULES)}"]
    for whole in ("pass_filenames: false", "always_run: true", "language: system"):
        assert config.count(whole) == len(hooks)


def test_the_house_rules_are_named_and_there() -> None:
    told = (ROOT / "CONTRIBUTING.md").read_text()
    for file in HOUSE_RULES:
        assert (ROOT / file).exists()
        assert f"`{file}`" in told


@pytest.mark.parametrize("top", ["tests/fuse", "tests/support"])
def test_each_folder_of_tests_is_told_of(top: str) -> None:
    _, _, told = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\nIn `{top}/`:\n\n| | |\n")
    rows = re.findall(r"^\| `(\w+)` \|", told.partition("\n\n")[0], re.MULTILINE)
    assert set(rows) == {
        path.relative_to(ROOT / top).parts[0] for path in ROOT.glob(f"{top}/*/**/*.py")
    }


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_an_issue_template_says_what_it_is_for(template: Path) -> None:
    head, text = re.fullmatch(r"---\n(.+?)\n---\n(.+)", template.read_text(), re.DOTALL).groups()  # type: ignore[union-attr]
    assert [line.partition(": ")[0] for line in head.splitlines()] == ["name", "about"]
    assert "**" in text


def test_there_are_templates() -> None:
    assert len(TEMPLATES) == 3
