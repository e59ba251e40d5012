"""The report of a run: report.json, a page for the browser, tables for the terminal."""

from eaglenest.report.models import Command, DrafterReport, Report, Stage, TrainPoint
from eaglenest.report.page import write_report
from eaglenest.report.terminal import render_bench, render_terminal

__all__ = [
    "Command",
    "DrafterReport",
    "Report",
    "Stage",
    "TrainPoint",
    "render_bench",
    "render_terminal",
    "write_report",
]
