"""Tests the files of the web pages: what the server sends, what they may contain, and the source of vendored files."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from llm_serving.web.files import static_files
from support.small_configs import REPOSITORY

STATIC = REPOSITORY / "llm_serving/web/static"
FILES = static_files()
OWN = [file for file in FILES.values() if not file.path.startswith("vendor/")]
PAGES = [file for file in OWN if file.content_type == "text/html"]
SCRIPTS = [file for file in OWN if file.content_type == "text/javascript"]
MANIFESTS = [STATIC / "vendor/manifest.json", REPOSITORY / "tests/page/vendor/manifest.json"]
MAX_LINES = 450
MAX_BYTES = 1_200_000


def text_of(file) -> str:
    return file.body.decode("utf-8")


def named_in(text: str) -> set[str]:
    """Returns the keys of translated texts that a page or a script uses."""
    return set(re.findall(r'data-i18n(?:-\w+)?="(\w+)"', text)) | set(re.findall(r'\bt\("(\w+)"', text))


def test_every_file_is_sent_with_its_type_and_policy(server):
    assert len(FILES) > 40
    for path, file in FILES.items():
        response = server.http.get(f"/static/{path}")
        assert (response.status_code, response.content) == (200, file.body), path
        assert response.headers["content-type"].partition(";")[0] == file.content_type, path
        assert response.headers["x-content-type-options"] == "nosniff", path
        assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; "), path


def test_a_browser_that_has_a_file_gets_no_body(server):
    first = server.http.get("/")
    again = server.http.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert server.http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    assert server.http.get("/static/chat.html").content == first.content


@pytest.mark.parametrize("path", ["", "none.js", "../files.py", "%2e%2e/files.py", "/etc/passwd", "js", "js/"])
def test_no_other_file_is_sent(server, path):
    assert server.http.get(f"/static/{path}").status_code == 404


def test_the_policy_has_no_exception(server):
    header = server.http.get("/").headers["content-security-policy"]
    policy = dict(part.strip().split(" ", 1) for part in header.split(";"))
    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "font-src": "'self'",
        "connect-src": "'self'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'",
        "frame-ancestors": "'none'", "require-trusted-types-for": "'script'", "trusted-types": "dompurify",
    }  # fmt: skip


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_vendored_files_are_those_of_the_manifest(manifest):
    packages = json.loads(manifest.read_text("utf-8"))["packages"]
    listed = {file["path"]: file["sha256"] for package in packages for file in package["files"]}
    folder = manifest.parent
    present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert set(listed) | {"manifest.json"} == set(present)
    assert {name: hashlib.sha256(present[name].read_bytes()).hexdigest() for name in listed} == listed
    for package in packages:
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert package["licence"] in ("MIT", "BSD-3-Clause", "(MPL-2.0 OR Apache-2.0)", "MPL-2.0")
        assert any(file["path"].endswith("LICENSE.txt") for file in package["files"]), package["name"]


def test_the_pages_are_small():
    assert sum(len(file.body) for file in FILES.values()) < MAX_BYTES
    assert [file.path for file in OWN if text_of(file).count("\n") > MAX_LINES] == []


def test_pages_have_no_inline_code_and_name_no_other_host():
    assert PAGES
    for page in PAGES:
        text = text_of(page)
        assert not re.search(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\son\w+\s*=|\sstyle\s*=", text), page.path
        for address in re.findall(r'(?:src|href)="([^"]+)"', text):
            known = address in ("data:,", "/", "/operator") or address.removeprefix("/static/") in FILES
            assert known or address.startswith("#"), address
    for file in OWN:
        assert not re.search(r"(?:https?:)?//[\w-]+\.\w", text_of(file)), file.path


def test_scripts_make_no_html_from_text():
    assert len(SCRIPTS) > 10
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|ContextualFragment"
    )
    for script in SCRIPTS:
        assert not re.search(forbidden, text_of(script)), script.path
        for name in re.findall(r'from "([^"]+)"', text_of(script)):
            place = (STATIC / script.path).parent / name
            assert place.is_file(), f"{script.path} imports {name}"


@pytest.mark.parametrize("english", [path for path in sorted(FILES) if re.fullmatch(r"texts/.*en\.json", path)])
def test_both_languages_have_the_same_texts(english):
    tables = [json.loads(text_of(FILES[path])) for path in (english, english.replace("en.json", "zh.json"))]
    assert tables[0].keys() == tables[1].keys()
    for key, text in tables[0].items():
        assert text.strip()
        assert tables[1][key].strip()
        assert sorted(re.findall(r"{\w+}", text)) == sorted(re.findall(r"{\w+}", tables[1][key])), key


def test_every_text_exists_and_is_used():
    used = {key for file in (*PAGES, *SCRIPTS) for key in named_in(text_of(file))}
    everywhere = "".join(text_of(file) for file in (*PAGES, *SCRIPTS))
    tables = [json.loads(text_of(file)) for path, file in FILES.items() if re.fullmatch(r"texts/.*en\.json", path)]
    known = {key for table in tables for key in table}
    assert used - known == set()
    assert {key for key in known if not re.search(rf'"{key}"', everywhere)} == set()
