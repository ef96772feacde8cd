"""The commands: ``soap-search``, ``soap-run`` and ``soap-simulate``. They parse, call ``soap.api`` and print; nothing is decided here."""
