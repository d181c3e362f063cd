"""Tests the language check. It finds prose in every kind of file, splits it into sentences, and rejects phrases."""

from pathlib import Path

import pytest

from tools import check_language

# Pairs of sentences from the language guide: a rejected sentence and its replacement.
PAIRS = [
    (
        "The queue takes so many as it may beside those who can start.",
        "Limits how many requests may wait.",
    ),
    ("it would be first for want of others only", "It is chosen only because no other request waits."),
    (
        "What decodes in peace is nothing else",
        "A decode step without new, finished or preempted requests is recorded as a single number.",
    ),
    (
        "Until the end is asked for, 0, or the group is gone, 1",
        "Returns 0 after Shutdown and 1 if the group failed.",
    ),
    (
        "What the thread has delivered last is still to be taken from the loop.",
        "The event loop has not yet processed the engine thread's last delivery.",
    ),
    (
        "A request came or went, or a step was answered.",
        "Returns True if a request was added or removed, or a step finished, since the last call.",
    ),
    ("Of an agent with all columns simply the linear layer.", "With all columns, an agent runs a linear layer."),
    ("Which step is to be run next.", "Chooses the next step."),
    ("The runs are made by turns.", "Runs of both trees alternate."),
    ("It is the door.", "It is `the door`."),
]


def found(tmp_path: Path, name: str, text: str) -> list[tuple[int, str]]:
    """Returns line and text of the sentences in a file with this text."""
    path = tmp_path / name
    path.write_text(text)
    return [(sentence.line, sentence.text) for sentence in check_language.sentences(path)]


@pytest.mark.parametrize(("bad", "good"), PAIRS)
def test_a_rejected_phrase_is_found_and_its_replacement_accepted(bad: str, good: str) -> None:
    assert check_language.Sentence(Path("x"), 1, bad).rejected()
    assert not check_language.Sentence(Path("x"), 1, good).rejected()


def test_python_comments_and_docstrings(tmp_path: Path) -> None:
    text = '''"""First line.

More of it. And e.g. this one
goes on.
"""

# One comment
# on two lines.
# Another sentence.
x = 1  # after code
y = 2  # after code, too

def f():
    """Returns ``a b`` here."""
    z = "no prose, it is a string"  # noqa: S101
'''
    assert sorted(found(tmp_path, "a.py", text)) == [
        (1, "First line."),
        (3, "And e.g. this one goes on."),
        (3, "More of it."),
        (7, "One comment on two lines."),
        (9, "Another sentence."),
        (10, "after code"),
        (11, "after code, too"),
        (14, "Returns ``a_b`` here."),
    ]


def test_c_comments(tmp_path: Path) -> None:
    text = """// One comment
// on two lines.
int x;  // trailing
int y;  // another
/* A block
 * comment. */
const char* s = "// no comment";  // NOLINT
//   [rows]     a table in columns is no prose
"""
    assert found(tmp_path, "a.cc", text) == [
        (1, "One comment on two lines."),
        (3, "trailing"),
        (4, "another"),
        (5, "A block comment."),
    ]


def test_pages(tmp_path: Path) -> None:
    text = """# A heading is no sentence

Text with a [link](to.md). Second
sentence.

- item one
- item two
  goes on

```
code is no prose
```

| head | two |
|---|---|
| cell. | `a b` |
"""
    assert found(tmp_path, "a.md", text) == [
        (3, "Text with a link."),
        (3, "Second sentence."),
        (6, "item one"),
        (7, "item two goes on"),
        (14, "head"),
        (14, "two"),
        (16, "cell."),
        (16, "`a_b`"),
    ]


def test_words() -> None:
    sentence = check_language.Sentence(Path("x"), 1, "One - `two_words` (three) and 4.")
    assert sentence.words == 5


def test_limits_decide_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Short. " * 9 + "Word" + " word" * 25 + ".\n\nIt is at the door.\n")
    assert check_language.main([str(page), "--max-long", "20", "--max-phrases", "20"]) == 0
    assert check_language.main([str(page), "--max-long", "5"]) == 1
    assert check_language.main([str(page), "--max-phrases", "5"]) == 1
    capsys.readouterr()
    assert check_language.main([str(page), "--list"]) == 0
    listing = capsys.readouterr().out
    assert f"{page}:1: Word word" in listing
    assert "26 words" in listing
    assert f"{page}:3: It is at the door." in listing
    assert "admission" in listing


def test_the_project_keeps_the_limits() -> None:
    """At most 1 % of the sentences are long, and fewer than 0.1 % have a rejected phrase."""
    assert check_language.main(["--max-long", "1", "--max-phrases", "0.1"]) == 0
