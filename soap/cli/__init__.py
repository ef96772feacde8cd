"""The commands: ``soap-search``, ``soap-run``, ``soap-simulate`` and ``soap-diff``.

They parse, call ``soap.api`` and print; nothing is decided here.
"""
