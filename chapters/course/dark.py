"""Figures on dark pages: each SVG brings the colors that it has there.

A figure has no ground of its own. Where the page around it is dark, which an image
knows by the ``color-scheme`` of its place, a rule of style gives each of its colors
another: pale and dark change places, hues stay.
"""

import colorsys
import re

# Of an attribute (fill="#1f2933"), or in an element's own style (fill: #1f2933).
COLOR = re.compile(r'(fill|stroke)(="|: )(#[0-9a-f]{6})(?![0-9a-f])')
STYLE_END = "</style>"


def dark(color: str) -> str:
    """The "#rrggbb" that is on a dark page what ``color`` is on a white one.

    White becomes a dark gray, ink a pale one, and tints become shades. Strong colors,
    which mark things on either ground, stay about as light as they are.
    """
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    chroma = max(red, green, blue) - min(red, green, blue)
    strong = min(max((chroma - 0.35) / 0.25, 0), 1)
    turned = 0.98 - 0.86 * lightness
    kept = min(max(lightness, 0.45), 0.62)
    mixed = strong * kept + (1 - strong) * turned
    if chroma > 0.25 and 0.5 < lightness < 0.7 and not strong:
        mixed = kept  # a middle tone would become too dark to be read
    return "#" + "".join(
        f"{round(255 * part):02x}"
        for part in colorsys.hls_to_rgb(hue, mixed, saturation * (1 - 0.2 * strong))
    )


def with_dark_style(svg: str) -> str:
    """``svg`` with the colors of a dark page in its style element."""
    head, end, rest = svg.partition(STYLE_END)
    assert end, "an SVG without a style element"
    rules = [f"svg{{fill:{dark('#000000')}}}"]  # of what names no color
    for kind, sign, color in sorted(set(COLOR.findall(svg))):
        own = f'{kind}="{color}"' if sign == '="' else f'style*="{kind}: {color}"'
        rules.append(f"[{own}]{{{kind}:{dark(color)}!important}}")
    dark_style = f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"
    return f"{head}{dark_style}{end}{rest}"
