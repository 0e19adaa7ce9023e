//! Charts as PNG, for where no browser is: in a mail, a ticket, a slide.
//!
//! What is drawn is the very markup that the page shows, in the colours of its light theme, with title and legend. The
//! font comes with the program, so that a picture looks the same on every machine, one without fonts among them.

use std::str::FromStr;

use epaint_default_fonts::UBUNTU_LIGHT;
use maud::Markup;
use roxmltree::{Document, Node};
use thiserror::Error;
use tiny_skia::{
    Color, FillRule, LineCap, LineJoin, Paint, Path, PathBuilder, Pixmap, PixmapMut, Rect, Stroke, StrokeDash,
    Transform,
};
use ttf_parser::{Face, OutlineBuilder};

use super::STYLE;

/// Pixels to a unit of the drawing: sharp on paper and on dense screens.
const SCALE: f32 = 2.0;
const MARGIN: f32 = 20.0;
/// As wide as a wide chart.
const WIDTH: f32 = 640.0;
const PANELS: usize = 3;
const PANEL_GAP: f32 = 50.0;

/// Why a chart could not be drawn.
#[derive(Debug, Error)]
pub enum PngError {
    /// The markup is none that this program makes.
    #[error("a chart cannot be read: {0}")]
    Markup(#[from] roxmltree::Error),
    /// The font within the program is damaged.
    #[error("the font cannot be read: {0}")]
    Font(#[from] ttf_parser::FaceParsingError),
    /// The picture would be too large, or has no extent.
    #[error("a picture of {width} x {height} pixels cannot be made")]
    Size {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
    },
    /// It could not be compressed.
    #[error("a picture cannot be written: {0}")]
    Encode(String),
}

/// Draws a chart, as its `html` made it.
pub fn png(chart: &Markup) -> Result<Vec<u8>, PngError> {
    let document = Document::parse(&chart.0)?;
    let pen = Pen { face: Face::parse(UBUNTU_LIGHT, 0)? };
    let (parts, bottom) = pen.lay_out(document.root_element());
    let pixels = |length: f32| ((length + 2.0 * MARGIN) * SCALE).ceil() as u32;
    let (width, height) = (pixels(WIDTH), pixels(bottom));
    let mut picture = Pixmap::new(width, height).ok_or(PngError::Size { width, height })?;
    picture.fill(colour("paper"));
    let page = Transform::from_scale(SCALE, SCALE).pre_translate(MARGIN, MARGIN);
    for Part { x, y, what } in parts {
        let place = page.pre_translate(x, y);
        let mut canvas = Canvas { pen: &pen, picture: picture.as_mut(), place };
        match what {
            What::Text(text, size, ink) => canvas.text(&text, [0.0, 0.0], size, 0.0, colour(ink)),
            What::Key(node) => canvas.key(node),
            What::Drawing(node) => canvas.children(node, "ink"),
        }
    }
    picture.encode_png().map_err(|error| PngError::Encode(error.to_string()))
}

/// Something at its place.
struct Part<'a> {
    x: f32,
    y: f32,
    what: What<'a>,
}

enum What<'a> {
    Text(String, f32, &'static str),
    Key(Node<'a, 'a>),
    Drawing(Node<'a, 'a>),
}

/// Knows how wide text is.
struct Pen<'f> {
    face: Face<'f>,
}

impl Pen<'_> {
    /// Title, legend and drawings of a figure, from the top; and where the last one ends.
    fn lay_out<'a>(&self, figure: Node<'a, 'a>) -> (Vec<Part<'a>>, f32) {
        let (mut parts, mut y) = (Vec::new(), 0.0);
        for node in figure.children().filter(Node::is_element) {
            match node.tag_name().name() {
                "figcaption" => y = self.title(&words(node), y, &mut parts),
                "ul" => y = self.legend(node, y, &mut parts),
                "svg" => {
                    parts.push(Part { x: 0.0, y, what: What::Drawing(node) });
                    y += view(node)[1];
                }
                _ => y = self.panels(node, y, &mut parts),
            }
        }
        (parts, y)
    }

    fn title<'a>(&self, title: &str, mut y: f32, parts: &mut Vec<Part<'a>>) -> f32 {
        const SIZE: f32 = 16.0;
        let mut line = String::new();
        let mut end = |line: &mut String| {
            parts.push(Part { x: 0.0, y: y + SIZE, what: What::Text(std::mem::take(line), SIZE, "ink") });
            y += 1.4 * SIZE;
        };
        for word in title.split_whitespace() {
            if !line.is_empty() && self.width(&format!("{line} {word}"), SIZE) > WIDTH {
                end(&mut line);
            }
            let gap = if line.is_empty() { "" } else { " " };
            line = format!("{line}{gap}{word}");
        }
        end(&mut line);
        y + 4.0
    }

    fn legend<'a>(&self, list: Node<'a, 'a>, mut y: f32, parts: &mut Vec<Part<'a>>) -> f32 {
        let (size, key_wide, gap, line) = (13.0, 29.0, 20.0, 20.0);
        let mut x = 0.0;
        for item in list.children().filter(|node| node.has_tag_name("li")) {
            let name = words(item);
            let wide = key_wide + self.width(&name, size);
            if x > 0.0 && x + wide > WIDTH {
                (x, y) = (0.0, y + line);
            }
            parts.extend(item.first_element_child().map(|key| Part { x, y: y + 9.0, what: What::Key(key) }));
            parts.push(Part { x: x + key_wide, y: y + 13.5, what: What::Text(name, size, "soft") });
            x += wide + gap;
        }
        if x > 0.0 { y + line + 8.0 } else { y }
    }

    /// Small charts under their names, or a remark that there are none.
    fn panels<'a>(&self, around: Node<'a, 'a>, y: f32, parts: &mut Vec<Part<'a>>) -> f32 {
        let (size, head) = (13.0, 20.0);
        let panels: Vec<_> = around.children().filter(Node::is_element).collect();
        let mut bottom = y;
        for (i, panel) in panels.iter().enumerate() {
            let drawing = panel.children().find(|node| node.has_tag_name("svg"));
            let [width, height] = drawing.map_or([180.0, 0.0], view);
            let (row, column) = ((i / PANELS) as f32, (i % PANELS) as f32);
            let (x, top) = (column * (width + PANEL_GAP), y + row * (height + head + 16.0));
            let name = panel.children().find(|node| node.has_tag_name("p")).map_or(words(*panel), words);
            parts.push(Part { x, y: top + size, what: What::Text(self.cut(&name, size, width), size, "soft") });
            parts.extend(drawing.map(|node| Part { x, y: top + head, what: What::Drawing(node) }));
            bottom = top + head + height;
        }
        bottom
    }

    /// As much of a text as there is room for.
    fn cut(&self, text: &str, size: f32, room: f32) -> String {
        let mut text = text.to_owned();
        while self.width(&text, size) > room && text.pop().is_some() {}
        text
    }

    fn width(&self, text: &str, size: f32) -> f32 {
        let glyphs = text.chars().filter_map(|c| self.face.glyph_index(c));
        let units: u32 = glyphs.filter_map(|glyph| self.face.glyph_hor_advance(glyph)).map(u32::from).sum();
        units as f32 * size / f32::from(self.face.units_per_em())
    }
}

/// Where something is drawn.
struct Canvas<'a> {
    pen: &'a Pen<'a>,
    picture: PixmapMut<'a>,
    place: Transform,
}

impl Canvas<'_> {
    fn children(&mut self, node: Node<'_, '_>, ink: &str) {
        node.children().filter(Node::is_element).for_each(|child| self.element(child, ink));
    }

    /// An element of a chart, as the page's style has it; `ink` is what it inherits.
    fn element(&mut self, node: Node<'_, '_>, ink: &str) {
        let ink = own_ink(node).unwrap_or(ink);
        let is = |class: &str| has_class(node, class);
        let tag = node.tag_name().name();
        let Some(shape) = shape(node) else {
            match tag {
                "g" => self.children(node, ink),
                "text" => self.label(node),
                _ => {}
            }
            return;
        };
        match tag {
            _ if is("grid") => self.stroke(&shape, colour("rule"), &thin()),
            _ if is("axis") => self.stroke(&shape, colour("axis"), &thin()),
            _ if is("limit") => self.stroke(&shape, colour("soft"), &dashed(thin())),
            _ if is("cross") => self.stroke(&shape, faded(colour(ink), 0.6), &thin()),
            _ if is("area") => {
                self.fill(&shape, colour(ink));
                self.stroke(&shape, colour("paper"), &Stroke { width: 0.75, line_join: LineJoin::Round, ..thin() });
            }
            _ if is("bar") => self.fill(&shape, faded(colour(ink), if is("negative") { 0.65 } else { 1.0 })),
            "circle" if is("line") => self.fill(&shape, colour(ink)),
            "circle" => {
                self.fill(&shape, faded(colour(ink), 0.8));
                self.stroke(&shape, colour("paper"), &Stroke { width: 0.75, ..thin() });
            }
            _ => self.stroke(&shape, colour(ink), &curve(is("dashed"))),
        }
    }

    fn label(&mut self, node: Node<'_, '_>) {
        const SIZE: f32 = 12.0;
        let down = if node.attribute("dy") == Some("0.35em") { 0.35 * SIZE } else { 0.0 };
        let from = [number(node, "x"), number(node, "y") + down];
        let anchor = match () {
            () if has_class(node, "middle") => 0.5,
            () if has_class(node, "end") => 1.0,
            () => 0.0,
        };
        self.text(&words(node), from, SIZE, anchor, colour("soft"));
    }

    /// The mark before a name in the legend, around the middle of its line.
    fn key(&mut self, node: Node<'_, '_>) {
        let ink = colour(own_ink(node).unwrap_or("ink"));
        if has_class(node, "cross") {
            self.text("×", [6.0, 5.0], 14.0, 0.0, ink);
        } else if let Some(dot) = PathBuilder::from_circle(11.0, 0.0, 5.6).filter(|_| has_class(node, "dot")) {
            self.fill(&dot, ink);
        } else if let Some(block) = Rect::from_xywh(5.0, -6.0, 12.0, 12.0).filter(|_| has_class(node, "block")) {
            self.fill(&PathBuilder::from_rect(block), ink);
        } else if let Some(line) = segments(&[[0.0, 0.0], [22.0, 0.0]], false) {
            let stroke = Stroke { width: 3.0, ..Stroke::default() };
            self.stroke(&line, ink, &if has_class(node, "dashed") { dashed(stroke) } else { stroke });
        }
    }

    /// Text whose baseline begins at `from`, or ends there, or has its middle there: `anchor` is the share before it.
    fn text(&mut self, text: &str, [x, y]: [f32; 2], size: f32, anchor: f32, ink: Color) {
        let unit = size / f32::from(self.pen.face.units_per_em());
        let mut outline = Outline { path: PathBuilder::new(), x: x - anchor * self.pen.width(text, size), y, unit };
        for glyph in text.chars().filter_map(|c| self.pen.face.glyph_index(c)) {
            self.pen.face.outline_glyph(glyph, &mut outline);
            outline.x += f32::from(self.pen.face.glyph_hor_advance(glyph).unwrap_or(0)) * unit;
        }
        if let Some(path) = outline.path.finish() {
            self.fill(&path, ink);
        }
    }

    fn fill(&mut self, path: &Path, ink: Color) {
        // A share of nothing has no area, which the painter would complain of.
        if path.bounds().width() <= 0.0 || path.bounds().height() <= 0.0 {
            return;
        }
        self.picture.fill_path(path, &paint(ink), FillRule::Winding, self.place, None);
    }

    fn stroke(&mut self, path: &Path, ink: Color, stroke: &Stroke) {
        self.picture.stroke_path(path, &paint(ink), stroke, self.place, None);
    }
}

/// Letters as outlines, one after the other.
struct Outline {
    path: PathBuilder,
    x: f32,
    y: f32,
    unit: f32,
}

impl Outline {
    /// Letters grow upwards, pictures downwards.
    fn at(&self, x: f32, y: f32) -> [f32; 2] {
        [self.x + x * self.unit, self.y - y * self.unit]
    }
}

impl OutlineBuilder for Outline {
    fn move_to(&mut self, x: f32, y: f32) {
        let [x, y] = self.at(x, y);
        self.path.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let [x, y] = self.at(x, y);
        self.path.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ([x1, y1], [x, y]) = (self.at(x1, y1), self.at(x, y));
        self.path.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let ([x1, y1], [x2, y2], [x, y]) = (self.at(x1, y1), self.at(x2, y2), self.at(x, y));
        self.path.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}

fn shape(node: Node<'_, '_>) -> Option<Path> {
    let of = |name: &str| number(node, name);
    match node.tag_name().name() {
        "line" => segments(&[[of("x1"), of("y1")], [of("x2"), of("y2")]], false),
        "polyline" => segments(&points(node), false),
        "polygon" => segments(&points(node), true),
        "rect" => Rect::from_xywh(of("x"), of("y"), of("width"), of("height")).map(PathBuilder::from_rect),
        "circle" => PathBuilder::from_circle(of("cx"), of("cy"), of("r")),
        _ => None,
    }
}

fn segments(points: &[[f32; 2]], closed: bool) -> Option<Path> {
    let mut path = PathBuilder::new();
    for (i, [x, y]) in points.iter().enumerate() {
        if i == 0 { path.move_to(*x, *y) } else { path.line_to(*x, *y) }
    }
    if closed {
        path.close();
    }
    path.finish()
}

fn points(node: Node<'_, '_>) -> Vec<[f32; 2]> {
    let point = |pair: &str| pair.split_once(',').and_then(|(x, y)| Some([f32::from_str(x).ok()?, y.parse().ok()?]));
    node.attribute("points").unwrap_or_default().split(' ').filter_map(point).collect()
}

/// Width and height of a drawing.
fn view(svg: Node<'_, '_>) -> [f32; 2] {
    let mut numbers = svg.attribute("viewBox").unwrap_or_default().split(' ').skip(2).filter_map(|n| n.parse().ok());
    [numbers.next().unwrap_or(WIDTH), numbers.next().unwrap_or(0.0)]
}

fn number(node: Node<'_, '_>, name: &str) -> f32 {
    node.attribute(name).and_then(|text| text.parse().ok()).unwrap_or(0.0)
}

fn words(node: Node<'_, '_>) -> String {
    node.descendants().filter_map(|node| node.text().filter(|_| node.is_text())).collect()
}

fn has_class(node: Node<'_, '_>, class: &str) -> bool {
    node.attribute("class").is_some_and(|classes| classes.split(' ').any(|own| own == class))
}

/// The colour that the classes of an element set for it and all within it.
fn own_ink<'a>(node: Node<'a, '_>) -> Option<&'a str> {
    let is_colour = |class: &&str| class.strip_prefix('c').is_some_and(|digit| digit.parse::<u8>().is_ok());
    match () {
        () if has_class(node, "grey") => Some("c9"),
        () if has_class(node, "faint") => Some("axis"),
        () => node.attribute("class")?.split(' ').find(is_colour),
    }
}

/// A colour of the light theme, which comes first in the style.
fn colour(name: &str) -> Color {
    let hex = STYLE.split(&format!("--{name}:#")).nth(1).unwrap_or_default();
    let hex: String = hex.chars().take_while(char::is_ascii_hexdigit).collect();
    let digit = |i: usize| hex.get(i..=i).and_then(|digit| u8::from_str_radix(digit, 16).ok()).unwrap_or(0);
    match hex.len() {
        3 => Color::from_rgba8(17 * digit(0), 17 * digit(1), 17 * digit(2), 255),
        _ => Color::from_rgba8(16 * digit(0) + digit(1), 16 * digit(2) + digit(3), 16 * digit(4) + digit(5), 255),
    }
}

fn faded(mut ink: Color, opacity: f32) -> Color {
    ink.apply_opacity(opacity);
    ink
}

fn paint(ink: Color) -> Paint<'static> {
    let mut paint = Paint::default();
    paint.set_color(ink);
    paint
}

fn thin() -> Stroke {
    Stroke { width: 1.0, ..Stroke::default() }
}

fn curve(is_dashed: bool) -> Stroke {
    let stroke = Stroke { width: 1.75, line_join: LineJoin::Round, line_cap: LineCap::Round, ..Stroke::default() };
    if is_dashed { dashed(stroke) } else { stroke }
}

fn dashed(stroke: Stroke) -> Stroke {
    Stroke { dash: StrokeDash::new(vec![6.0, 5.0], 0.0), ..stroke }
}

#[cfg(test)]
mod tests {
    use super::super::{Cloud, Lines, Look, Scatter, Series, Spectrum, StackedShares};
    use super::*;

    fn drawn(chart: Markup) -> Pixmap {
        Pixmap::decode_png(&png(&chart).unwrap()).unwrap()
    }

    /// How many pixels are just of this colour of the light theme.
    fn pixels(picture: &Pixmap, name: &str) -> usize {
        let wanted = colour(name).premultiply().to_color_u8();
        picture.pixels().iter().filter(|pixel| **pixel == wanted).count()
    }

    fn lines(count: usize) -> Markup {
        let series = |i: usize| Series {
            name: format!("series number {i}"),
            points: (0..50).map(|x| (f64::from(x), (i * 50) as f64 + f64::from(x))).collect(),
            dashed: i == 1,
        };
        let [title, x_label, y_label] = ["Reward over time", "queries", "reward"].map(str::to_owned);
        Lines { title, x_label, y_label, series: (0..count).map(series).collect() }.html()
    }

    #[test]
    fn all_kinds_of_charts_have_their_size_and_their_colours() {
        let shares = StackedShares {
            title: "Traffic".to_owned(),
            x_label: "queries".to_owned(),
            names: vec!["a".to_owned(), "b".to_owned()],
            x: vec![0.0, 1.0],
            shares: vec![vec![0.5, 0.5], vec![0.2, 0.8]],
        };
        let models = (0..4).map(|i| (format!("model-{i}"), vec![2.0, 0.5, -1.0])).collect();
        let spectrum = Spectrum { title: "Eigenvalues".to_owned(), models };
        let cloud = |look, at: f64| Cloud { name: "items".to_owned(), points: vec![(at, at), (at, 9.0)], look };
        let clouds = vec![cloud(Look::Bright, 1.0), cloud(Look::Grey, 3.0), cloud(Look::Faint, 5.0)];
        let scatter = Scatter { title: "Ranks".to_owned(), clouds, limits: Some((4.0, 4.0)), ..Scatter::default() };
        // A title, a line of the legend unless there is none, the drawings: each picture twice as large as its parts.
        for (chart, height, inks) in [
            (lines(2), 26.4 + 28.0 + 300.0, &["c0", "c1", "rule", "axis"][..]),
            (shares.html(), 26.4 + 28.0 + 300.0, &["c0", "c1", "axis"]),
            (spectrum.html(), 26.4 + 156.0 + 140.0, &["c0", "c1", "c2", "c3"]),
            (scatter.html(), 26.4 + 28.0 + 480.0, &["c0", "c9", "rule"]),
        ] {
            let picture = drawn(chart);
            let expected = (2 * 680, (2.0 * (height + 40.0_f64)).ceil() as u32);
            assert_eq!((picture.width(), picture.height()), expected);
            let all = (picture.width() * picture.height()) as usize;
            assert!(pixels(&picture, "paper") > all / 4, "it stands on paper");
            for ink in inks {
                assert!(pixels(&picture, ink) > 50, "{ink}: {}", pixels(&picture, ink));
            }
        }
    }

    #[test]
    fn a_long_legend_has_several_lines() {
        assert!(drawn(lines(9)).height() > drawn(lines(2)).height() + 30);
    }

    #[test]
    fn charts_of_nothing_can_be_drawn() {
        for chart in [Lines::default().html(), StackedShares::default().html(), Spectrum::default().html()] {
            assert!(drawn(chart).height() > 40);
        }
        assert!(matches!(png(&maud::PreEscaped("<figure>".to_owned())), Err(PngError::Markup(_))));
    }

    #[test]
    fn the_font_has_what_charts_say() {
        let face = Face::parse(UBUNTU_LIGHT, 0).unwrap();
        for c in (' '..='~').chain("−×±äéñøß".chars()) {
            assert!(face.glyph_index(c).is_some(), "{c}");
        }
    }

    #[test]
    fn colours_are_those_of_the_light_theme() {
        assert_eq!(colour("paper"), Color::WHITE);
        assert_eq!(colour("c0"), Color::from_rgba8(0x00, 0x72, 0xb2, 255));
        assert_eq!(colour("c9"), Color::from_rgba8(0x7f, 0x86, 0x8d, 255));
    }
}
