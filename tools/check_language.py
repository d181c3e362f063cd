#!/usr/bin/env python3
"""Counts hard-to-read sentences in comments, docstrings and user pages.

Two things are counted: sentences with more than 25 words, and sentences with a phrase of ``REJECTED``. A code span
(in backquotes) counts as one word. Code blocks, headings and commands are not prose and are skipped.

    python tools/check_language.py                              # percentages of each package
    python tools/check_language.py --list llm_serving/engine    # the sentences themselves, with file and line
    python tools/check_language.py --max-long 1 --max-phrases 0.1   # exit code 1 above either percentage
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    from re import _parser  # type: ignore[attr-defined]
else:
    import sre_parse as _parser

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("llm_serving", "agent", "performance", "tools", "tests")
FILES = ("setup.py", "start_server.py")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")
LAB = "docs/lab"
"""Folder of measurements and rejected experiments. These pages are history and are not checked."""

C_SUFFIXES = {".c", ".cc", ".h", ".inc"}
MAX_WORDS = 25
"""Maximum number of words of a sentence."""


class Rejected(NamedTuple):
    """A phrase that the language guide rejects."""

    pattern: str
    """Regular expression of the rejected phrase. Case does not matter."""
    instead: str
    """The replacement for the phrase, or the reason for the rejection."""


_PERSONS = ("users", "readers", "operators", "engineer", "developers", "people", "everyone")
_NO_PERSON = "".join(f"(?<!{person} )" for person in _PERSONS)

# Each phrase is here because a reader had to guess its meaning. To reject another phrase, add a line.
REJECTED = [
    # Metaphors that only this project uses. The field has a common word for each of them.
    Rejected(r"\bin peace\b", "undisturbed"),
    Rejected(r"\bby turns\b", "alternately; in alternating runs"),
    Rejected(r"\bdoors?\b", "admission, admission limit"),
    Rejected(r"\bfates?\b", "outcome"),
    Rejected(r"\b(a|the|this|that|every|each|which|what) moments?\b|\bmoments\b", "a time, a period, or the event"),
    Rejected(r"\b(tells?|told|telling)\b", "reports, sends, shows"),
    Rejected(r"\banswered\b", "completed, returned"),
    Rejected(r"\b(a|the|each|every|per|this|one|its|next|last|first) turns?\b(?! (on|off|out|into))", "loop iteration"),
    Rejected(r"\brooms?\b(?! temperature)", "capacity, space"),
    Rejected(r"\b(came|comes?|coming) (and|or) (went|goes?|going)\b", "was added or removed"),
    Rejected(r"\bgone\b", "failed, closed, deleted, ended"),
    Rejected(r"\b(its|their|his) (way|life|death)\b", "the field's word: path, lifetime, exit"),
    Rejected(r"\blife and death\b", "start and stop"),
    # Words that stand for a noun, so that the reader must guess which noun.
    Rejected(r"\bsuch\b(?! as\b)", "name the noun; this, these"),
    Rejected(r"\bso (many|much)\b", "give the number or name it"),
    Rejected(r"\bthe most of\b|\bthe most that\b|\bno more than (is|are|it|they|those)\b", "maximum"),
    Rejected(r"\b(nobody|somebody|anybody|everybody)\b", "no request, a client, each process: name it"),
    Rejected(rf"{_NO_PERSON}(?<!^)\bwho\b", "that"),
    Rejected(r"\bwhose (turn|own|is|are)\b", "name the owner"),
    Rejected(r"\bnothing else\b|\bnothing (more|less) than\b", "only"),
    Rejected(r"\bnone else\b|\bno others\b|\bno other[.,;:]", "name the noun: no other request, no other process"),
    Rejected(r"\bwhat of (it|them)\b", "name the noun"),
    Rejected(r"\bwhat (it|they|one|he) (is|are|was|were) (made|asked|given)\b", "name the noun"),
    Rejected(r"\band so (does|do|is|are|has|have|it is)\b", "also; write a second sentence"),
    # Functions are described in the third person.
    Rejected(r"^(?-i:Return|Yield|Raise|Pass)\b(?! values)", "Returns, Yields, Raises"),
    # Phrases with inverted word order or without a verb.
    Rejected(r"^What \w[^?]*$", "start with the noun that 'what' stands for"),
    Rejected(r"^(Of|Those|That of|Those of) ", "start with the subject"),
    Rejected(r"^(Is|Are|Has|Have|Was|Were|Had) (it|they|he|there|this|that|a|the)\b[^?]*$", "If ..., then ..."),
    Rejected(r"\b(is|are|was|were|still|yet|be|being) to be\b", "must be, will be, or: is not yet"),
    Rejected(r"\b(nor|neither) (is|are|does|do|has|have|can|may|was|were)\b", "write a second sentence with 'not'"),
    Rejected(r"\bbe it\b|\bbeing (the|a|an|one) ", "use a verb: is, has; write a second sentence"),
    Rejected(r"\bhad (it|they|there|he) \b", "if it had"),
    Rejected(r"\bits being\b|\btheir being\b|\b's being\b", "use a clause with a verb"),
    # Rare or literary words, with a common word for each.
    Rejected(r"\bbut for\b(?! (the|a|each|every|all)? ?(first|reason))", "except, apart from"),
    Rejected(r"\bfor want of\b", "because there is no"),
    Rejected(r"\bin place of\b", "instead of"),
    Rejected(r"\bis said to be\b|\bare said to be\b", "is documented as, is called"),
    Rejected(r"\bsay what they say\b|\bsays? (what|so)\b", "reports, states"),
    Rejected(r"\bbesides\b", "also"),
    Rejected(r"\bbeside\b", "next to, as well as, in addition to"),
    Rejected(r"\banew\b", "again"),
    Rejected(r"\b(here|there|where)(of|in|upon|to|with|from|about)\b", "of it, in it, ..."),
    Rejected(r"\b(whence|hither|thither|hence|ere|lest|albeit)\b", "use a common word"),
    Rejected(r"\bone likes\b|\bas long as one\b|\bone's\b", "name the actor"),
    Rejected(r"\bat once\b", "immediately; at the same time"),
    Rejected(r"\bof itself\b|\bby itself alone\b", "alone; without other requests"),
    Rejected(r"\bmade out\b|\bmade up of\b", "found; consists of"),
    Rejected(r"\bhold(s|ing)? (\w+ ){1,4}to (that|this|it|them)\b|\bheld to (that|this|it)\b", "checks, tests"),
    Rejected(r"\bfor (it|they|there|this|that|he) (is|are|was|were|has|have|can|may|does)\b", "because"),
    Rejected(r"\bas (it|they) (is|are|may|might|can) (be|it|they|beside)\b", "name the number or the state"),
]
_WORD = re.compile(r"\S*\w\S*")


def _necessary_parts(items: Iterable[Any]) -> tuple[str, ...]:
    """Returns texts in lower case, of which every match contains one, or no texts if none are known.

    ``items`` is a parsed regular expression. The search for these texts takes a tenth of the time of the expression.
    """
    found: list[tuple[str, ...]] = [()]
    letters = ""
    for name, argument in [*items, ("END", None)]:
        if str(name) == "LITERAL":
            letters += chr(argument).lower()
            continue
        found.append((letters,) if letters else ())
        letters = ""
        if str(name) == "SUBPATTERN":
            found.append(_necessary_parts(argument[-1]))
        elif str(name) == "BRANCH":
            branches = [_necessary_parts(branch) for branch in argument[1]]
            found.append(tuple({part for parts in branches for part in parts}) if all(branches) else ())
    return max(found, key=lambda parts: min(map(len, parts), default=0))


_REJECTED = [
    (re.compile(rejected.pattern, re.IGNORECASE), _necessary_parts(_parser.parse(rejected.pattern)) or ("",), rejected)
    for rejected in REJECTED
]


@dataclass(frozen=True)
class Sentence:
    """A sentence of a comment, docstring or page, and the line where it begins."""

    path: Path
    line: int
    text: str

    @property
    def words(self) -> int:
        """The number of words; a code span is one word."""
        return len(_WORD.findall(self.text))

    def rejected(self) -> list[Rejected]:
        """The rejected phrases in this sentence. Code spans are names and may contain any word."""
        text = _SPAN.sub("`code`", self.text)
        letters = text.lower()
        found = []
        for pattern, parts, rejected in _REJECTED:
            for part in parts:
                if part in letters:
                    found += [rejected] if pattern.search(text) else []
                    break
        return found


Line = tuple[int, str]
"""Line number and text."""


def prose(path: Path) -> Iterator[list[Line]]:
    """Yields the blocks of prose in a file: comments and docstrings of code, or the paragraphs of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        docstrings, comments = _python_prose(text)
        yield from docstrings
        yield from _comment_blocks(comments)
    elif path.suffix in C_SUFFIXES:
        yield from _comment_blocks(_c_comments(text))
    else:
        yield _page_lines(text)


def sentences(path: Path) -> Iterator[Sentence]:
    """Yields the sentences of a file."""
    for block in prose(path):
        for paragraph in _paragraphs(block):
            for line, text in _split(paragraph):
                sentence = Sentence(path, line, text)
                if sentence.words:
                    yield sentence


def checked_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields the checked files at or below ``paths``."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            suffixes = {".md"} if file.suffix == ".md" else {".py", *C_SUFFIXES}
            inside = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
            if file.is_file() and file.suffix in suffixes and not inside.startswith(LAB + "/"):
                yield file


_PYTHON_TOKEN = re.compile(
    r'(?P<string>(?:\b[rRuUbBfF]{1,2})?(?:"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'))'
    r"|(?P<comment>#[^\n]*)|(?P<open>[(\[{])|[)\]}]",
    re.DOTALL,
)
_AFTER_STATEMENT = re.compile(r"[ \t]*(#|\n|$)")


def _python_prose(text: str) -> tuple[list[list[Line]], list[Comment]]:
    """Returns the docstrings and the comments of a module. A docstring is every statement that is only a string.

    Uses a regular expression, because the module ``tokenize`` takes ten times as long.
    """
    docstrings: list[list[Line]] = []
    comments: list[Comment] = []
    depth, number, counted = 0, 1, 0
    for match in _PYTHON_TOKEN.finditer(text):
        start = match.start()
        number += text.count("\n", counted, start)
        counted = start
        if match["string"]:
            begin = text.rfind("\n", 0, start) + 1
            is_alone = not depth and text[begin:start].isspace() | (begin == start)
            if is_alone and text[begin - 2 : begin] != "\\\n" and _AFTER_STATEMENT.match(text, match.end()):
                value = ast.literal_eval(match[0]) if match[0][0] not in "fFbB" else None
                if isinstance(value, str):
                    docstrings.append(_docstring_lines(value, number))
        elif match["comment"]:
            begin = text.rfind("\n", 0, start) + 1
            if not match[0].startswith("#!"):
                body = _PRAGMA.sub("", match[0].lstrip("#: "))
                comments.append(Comment(number, start - begin, bool(text[begin:start].strip()), body.rstrip("# ")))
        else:
            depth += 1 if match["open"] else -1
    return docstrings, comments


def _docstring_lines(value: str, number: int) -> list[Line]:
    """Returns the lines of a docstring that begins in line ``number``, without their indentation."""
    first, *rest = value.expandtabs().split("\n")
    indent = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return list(enumerate([first.strip(), *(line[indent:].rstrip() for line in rest)], number))


_PRAGMA = re.compile(r"(noqa|type: ignore|pragma|fmt|mypy):?\b.*")


class Comment(NamedTuple):
    """One line of a comment, with its place in the file."""

    line: int
    column: int
    trails: bool
    """True if code precedes the comment on its line."""
    text: str


_C_TOKEN = re.compile(
    r'R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<!\w)'(?:\\.|[^'\\\n])+'|(?P<comment>//[^\n]*|/\*.*?\*/)",
    re.DOTALL,
)


def _c_comments(text: str) -> Iterator[Comment]:
    """Yields each line of the comments of a C or C++ file."""
    for match in _C_TOKEN.finditer(text):
        comment = match["comment"]
        if comment is None:
            continue
        line = text.count("\n", 0, match.start()) + 1
        begin = text.rfind("\n", 0, match.start()) + 1
        trails = bool(text[begin : match.start()].strip())
        for offset, part in enumerate(comment.split("\n")):
            body = re.sub(r"^\s*(///?!?<?|/\*+!?|\*+/?)|\*/\s*$", "", part)
            if not re.match(r"\s*(NOLINT|clang-format|namespace\b|LLMK_)", body):
                column = match.start() - begin
                yield Comment(line + offset, column, trails and not offset, body[1:] if body.startswith(" ") else body)


def _comment_blocks(comments: Iterable[Comment]) -> Iterator[list[Line]]:
    """Joins comments on consecutive lines in the same column to blocks. A comment after code begins a block."""
    block: list[Line] = []
    last_line = last_column = -1
    for line, column, trails, text in comments:
        if block and (trails or line != last_line + 1 or column != last_column):
            yield block
            block = []
        block.append((line, text))
        last_line, last_column = line, column
    if block:
        yield block


def _page_lines(text: str) -> list[Line]:
    """Returns the prose of a Markdown page as lines. Each cell of a table is a line. Code and headings become empty
    lines.
    """
    lines: list[Line] = []
    fenced = comment = False
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"\s*(```|~~~)", line):
            fenced = not fenced
            line = ""
        comment = comment or line.lstrip().startswith("<!--")
        if fenced or comment or re.match(r"#+ |!\[[^]]*\]\([^)]*\)$|    |\s*\|[-| :]+\|$|<", line):
            lines.append((number, ""))
        elif line.lstrip().startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip("| ")):
                lines += [(number, cell.strip()), (number, "")]
        else:
            lines.append((number, re.sub(r"^[>\s]+", "", line)))
        comment = comment and "-->" not in line
    return lines


_ITEM = re.compile(r"\s*([-*+]|\d+[.)]) +")
_CODE = re.compile(r"\s*(>>>|\$ |\.\. )|.*\S   +\S|    ")


def _paragraphs(lines: list[Line]) -> Iterator[list[Line]]:
    """Splits a block into paragraphs, at empty lines and list items.

    Lines of code, and lines with columns (diagrams and tables), are left out.
    """
    paragraph: list[Line] = []
    example = False
    for number, line in lines:
        example = example and (not line.strip() or line.startswith("    "))
        starts = _ITEM.match(line)
        if not line.strip() or starts or example or _CODE.match(line):
            if paragraph:
                yield paragraph
            paragraph = []
        if line.strip() and not example and not _CODE.match(line):
            paragraph.append((number, _ITEM.sub("", line, count=1) if starts else line.strip()))
        example = example or line.rstrip().endswith("::")
    if paragraph:
        yield paragraph


_SPAN = re.compile(r"``[^`]+``|`[^`]+`")
_LINK = re.compile(r"!?\[([^]]*)\](\([^)]*\)|\[[^]]*\])")
_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\betc)(?<!\bcf)[.!?][)\"'*_]*\s+(?=[\"'(*_`\[A-Z0-9§«]|$)")


def _split(paragraph: list[Line]) -> Iterator[Line]:
    """Splits a paragraph into sentences, each with the line where it begins."""
    text = ""
    starts: list[tuple[int, int]] = []
    for number, part in paragraph:
        starts.append((len(text), number))
        text += part + " "
    masked = _SPAN.sub(lambda match: "`" + "x" * (len(match[0]) - 2) + "`", text)
    begin = 0
    for end in [*(match.end() for match in _END.finditer(masked)), len(text)]:
        if text[begin:end].strip():
            line = max(number for offset, number in starts if offset <= begin)
            yield line, _plain(text[begin:end])
        begin = end


def _plain(text: str) -> str:
    """Returns a sentence with each code span as one word and each link as its text."""
    spans = _SPAN.sub(lambda match: re.sub(r"\s+", "_", match[0]), text)
    return re.sub(r"\s+", " ", _LINK.sub(r"\1", spans)).strip()


def package(path: Path) -> str:
    """Returns the name under which a file's sentences are counted, such as ``llm_serving/engine`` or ``docs``."""
    inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return "/".join(inside.parent.parts[:2]) or "(root)"


def main(arguments: list[str] | None = None) -> int:
    """Prints the percentages or the sentences; returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files or folders (default: everything)")
    parser.add_argument("--list", action="store_true", help="print each sentence with file and line")
    parser.add_argument("--max-long", type=float, metavar="PERCENT", help="limit for sentences over 25 words")
    parser.add_argument("--max-phrases", type=float, metavar="PERCENT", help="limit for rejected phrases")
    options = parser.parse_args(arguments)
    everything = [ROOT / name for name in (*FOLDERS, *FILES, *PAGES)]
    paths = [path.resolve() for path in options.paths] or [path for path in everything if path.exists()]
    for path in paths:
        if not path.exists():
            parser.error(f"{path} does not exist")
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for file in checked_files(paths):
        names = (package(file), "total")
        for sentence in sentences(file):
            phrases = sentence.rejected()
            long = sentence.words > MAX_WORDS
            for name in names:
                for index, amount in enumerate((1, long, bool(phrases))):
                    counts[name][index] += amount
            if options.list and (long or phrases):
                where = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
                print(f"{where}:{sentence.line}: {sentence.text}")
                if long:
                    print(f"    {sentence.words} words: split the sentence")
                for rejected in phrases:
                    match = re.search(rejected.pattern, sentence.text, re.IGNORECASE)
                    print(f"    {match[0] if match else ''!r}: {rejected.instead}")
    total = counts.pop("total", [0, 0, 0])
    print(f"{'package':32} {'sentences':>9} {'over 25 words':>14} {'rejected phrases':>17}")
    for name, (number, long_ones, phrased) in [*sorted(counts.items()), ("total", total)]:
        print(f"{name:32} {number:9} {_percent(long_ones, number):12.2f} % {_percent(phrased, number):15.2f} %")
    limits = ((options.max_long, total[1]), (options.max_phrases, total[2]))
    exceeded = [limit for limit, count in limits if limit is not None and _percent(count, total[0]) >= limit]
    return 1 if exceeded else 0


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


if __name__ == "__main__":
    sys.exit(main())
