"""Shows people what a schedule or a run does: text and drawings from ops and traces."""
