"""Explorers for use in JupyterLab that remain still pictures where nothing is live.

An explorer displays itself as the widget and, in the same output, as a picture in HTML. A live front end shows the
first; a page made of the notebook (`kernelbook.report`) has nobody to answer a widget and shows the second.
"""

import html
import threading

import ipywidgets as widgets

from kernelbook import lane_plots
from kernelbook.fragments import INSTRUCTIONS, LOADS, Tokens

FIRST = "mmac_i32_16x16x32_i8"  # the article's instruction, which the still picture shows


class LaneMap(widgets.VBox):
    """Controls, and below them the picture of the tokens that they describe. Made by `lane_map`."""

    def __init__(self):
        self._drawing = threading.RLock()
        self.instruction = widgets.Dropdown(options=list(INSTRUCTIONS), value=FIRST, description="instruction")
        self.operand = widgets.Dropdown(options=["A", "B"], value="B", description="V is")
        self.load = widgets.Dropdown(options=LOADS, value=max(LOADS), description="load, bytes")
        self.lane = widgets.IntSlider(value=0, min=0, description="lane", continuous_update=False)
        self.picture = widgets.HTML()
        controls = [self.instruction, self.operand, self.load, self.lane]
        super().__init__([*controls, self.picture])
        for control in controls:
            control.observe(self._draw, "value")
        self._draw()

    def _draw(self, change=None):
        # JupyterLab may have two changes handled at once, in threads: the later picture must be of the later choice.
        with self._drawing:
            instruction = INSTRUCTIONS[self.instruction.value]
            self.lane.max = instruction.lanes - 1  # a lane beyond it becomes the last, which draws again
            try:
                tokens = Tokens(instruction, self.load.value, self.operand.value)
            except ValueError as refusal:
                self.text = str(refusal)
                self.picture.value = f'<p role="alert">{html.escape(self.text)}</p>'
            else:
                figures = lane_plots.ownership(tokens), lane_plots.load_path(tokens, self.lane.value)
                self.text = "\n".join(map(repr, figures))
                self.picture.value = "".join(figure._repr_html_() for figure in figures)

    def _repr_mimebundle_(self, **kwargs):
        return {**super()._repr_mimebundle_(**kwargs), "text/html": self.picture.value, "text/plain": self.text}


def lane_map() -> LaneMap:
    """An explorer of who loads and who multiplies which token of V.

    Choose the instruction, the operand that V is, the bytes a lane loads at once and a lane: above the tokens of each
    step and the scales that grouping neighbouring tokens would give them, below what the lane loads. A choice that
    cannot be (V in an unsigned operand) shows why in place of the picture.
    """
    return LaneMap()
