"""The report of a run: report.json, a page for the browser, tables for the terminal."""
