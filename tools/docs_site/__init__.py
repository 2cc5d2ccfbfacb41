"""The site of the documentation: the pages of docs/, and a reference from the docstrings.

`public_names` finds definitions in the sources, `docstrings` takes docstrings apart, `reference`
writes both as Markdown, and `staging` copies the pages to where Sphinx, with the settings of
`conf`, makes HTML of them. tools/build_site.py calls them.
"""
