"""The web pages as files: HTML, CSS, JavaScript and vendored libraries. ``files.py`` lists them with type and hash.

``server/pages.py`` sends them. ``static/vendor/manifest.json`` names the package, version, licence and hash of each
vendored file; ``tools/vendor_page_libraries.py`` makes these files again.
"""
