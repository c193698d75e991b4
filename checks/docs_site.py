"""Builds the site of docs/ with mkdocs, offline: every warning is an error, a dead link or anchor above all.

make docs -> [docs_site] -> build/docs (the pages, laid out as in the repository) -> mkdocs -> build/site

What a page links to lies beside it as it does here, sources included. The site loads nothing from the
network: what was built is searched for it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES, SITE = REPOSITORY / "build/docs", REPOSITORY / "build/site"
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)[^)]*\)")
LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//|<link[^>]+href=\"?(?:https?:)?//[^>]+stylesheet"
)


def main() -> int:
    """Lay the pages out, build them, and look at what was built."""
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("[a-z]*/*.md")]
    lay_out(REPOSITORY / "docs/site.css")
    for page in pages:
        lay_out(page)
        for target in LINK.findall(page.read_text()):
            lay_out((page.parent / target).resolve())
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    # Its own --quiet would count no warnings either.
    done = subprocess.run(command, cwd=REPOSITORY, env=quiet, check=False, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr)
    outside = [page.name for page in SITE.rglob("*.html") if LOADED.search(page.read_text())]
    if outside:
        print(f"loaded from the network: {', '.join(outside)}")
    elif not done.returncode:
        print(f"{len(pages)} pages: {SITE / 'index.html'}")
    return 1 if done.returncode or outside else 0


def lay_out(path: Path) -> None:
    """Copies a file of the repository to its place among the pages."""
    if path.is_file():
        place = PAGES / path.relative_to(REPOSITORY)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


if __name__ == "__main__":
    sys.exit(main())
