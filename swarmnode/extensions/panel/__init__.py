"""The panel of a node on a terminal: drawn in place by `join`, once by `status`."""

from swarmnode.registry import Parts

PARTS: Parts = {"panel": {"terminal": "swarmnode.extensions.panel.live_panel:PANEL"}}
