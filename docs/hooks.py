"""Links of the documentation that leave it lead to the repository, where the site has no page."""

import posixpath
import re
from pathlib import Path

LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
REPOSITORY = "https://github.com/plimsoll-vm/plimsoll/blob/main/"


def on_page_markdown(markdown, page, config, files):
    """Rewrites relative links to what is not part of the site."""

    def rewritten(link):
        begin, target, anchor, end = link.groups()
        if "://" in target or target.startswith("mailto:"):
            return link.group(0)
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), target))
        inside = path.removeprefix("docs/") if path.startswith("docs/") else None
        if inside is not None and files.get_file_from_path(inside) is not None:
            return link.group(0)
        if not (Path(config.config_file_path).parent / path).exists():
            # Left as it is, so that the site's own check finds it.
            return link.group(0)
        return f"{begin}{REPOSITORY}{path}{anchor or ''}{end}"

    return LINK.sub(rewritten, markdown)
