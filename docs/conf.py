"""How Sphinx builds the documentation: ``make docs``, from the files of this checkout and without a network."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from optuna_dsat import __version__

logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells each import what it sets up

project = "optuna-dsat"
author = "The optuna-dsat authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["generate"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_title = f"optuna-dsat {release}"
html_show_copyright = False  # the licence stands in LICENSE; a line without a year and a name says nothing
html_last_updated_fmt = None
nitpicky = False
smartquotes = False  # two dashes are two dashes

myst_heading_anchors = 3

python_maximum_signature_line_length = 100
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["accelerate", "deepspeed", "lightning", "transformers"]
napoleon_numpy_docstring = False
napoleon_use_rtype = False
