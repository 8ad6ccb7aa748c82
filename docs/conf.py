"""Settings of the site, see `docs.site`. Nothing in it comes from the network when it is read."""

from docs.site import FRONT, setup
from igcore import __version__

__all__ = ["setup"]

project = "igcore"
author = "The maintainers of igcore"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # formulas without a network
]
root_doc = FRONT
# the whole repository is the source, of which these are pages
include_patterns = ["[RCS]*.md", "docs/*.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", "runs"]  # large folders, through which Sphinx would look
suppress_warnings = ["mystnb.unknown_mime_type"]

nb_execution_mode = "off"  # the notebooks were executed by the walk
nb_output_stderr = "remove"  # progress bars
nb_ipywidgets_js = {}  # no page holds a living widget
default_role = "py:obj"  # of names in docstrings
highlight_language = "text"  # of blocks that name no language
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
napoleon_use_ivar = True  # an attribute with a property of its own is documented there
autodoc_typehints = "none"  # the docstrings name the types
autodoc_member_order = "bysource"

html_theme = "sphinx_book_theme"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "navbar_persistent": [],  # every page already has the search
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
}
