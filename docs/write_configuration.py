"""Writes configuration.md beside itself: python docs/write_configuration.py"""

from pathlib import Path

from greedysnake.report.configuration_text import configuration_page

Path(__file__).with_name("configuration.md").write_text(configuration_page())
