"""The commands: ``soap-search``, ``soap-run``, ``soap-simulate`` and others. They parse options, call ``soap.api`` and print; they
decide nothing."""
