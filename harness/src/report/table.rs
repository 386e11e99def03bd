//! A table of measurements, apart from any format.

/// What one column holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    /// For people.
    pub name: String,
    /// For programs: the field's name in JSON and CSV.
    pub key: String,
    /// For example `ms`; it stands in the heading, never in the cells.
    pub unit: Option<String>,
    pub precision: Precision,
    /// Numbers stand at the right.
    pub numeric: bool,
}

/// How many digits a number is shown with. Files for programs have all digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// After the point.
    Decimals(usize),
    /// Digits that matter; large and small numbers get a power of ten.
    Significant(usize),
}

/// What stands in one place of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Text(String),
    Integer(i64),
    Number(f64),
    /// A mean and the standard deviation of what it is the mean of.
    MeanStd(f64, f64),
    /// There is nothing to say.
    Empty,
    /// The question makes no sense here.
    NotApplicable,
    /// It did not fit into the device's memory.
    OutOfMemory,
}

/// Rows of cells under columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// For file names: words joined by `-`.
    pub name: String,
    pub title: String,
    pub columns: Vec<Column>,
    pub rows: Vec<Vec<Cell>>,
    /// Sentences below the table.
    pub notes: Vec<String>,
}

impl Column {
    fn new(name: &str, precision: Precision, numeric: bool) -> Column {
        Column { name: name.to_string(), key: slug(name), unit: None, precision, numeric }
    }

    /// A column of words.
    pub fn text(name: &str) -> Column {
        Column::new(name, Precision::Significant(4), false)
    }

    /// A column of numbers, with four digits that matter unless told otherwise.
    pub fn number(name: &str) -> Column {
        Column::new(name, Precision::Significant(4), true)
    }

    /// A column of counts.
    pub fn integer(name: &str) -> Column {
        Column::new(name, Precision::Decimals(0), true)
    }

    /// In `unit`, which becomes the end of the key too: `forward` in `ms` is `forward_ms`.
    #[must_use]
    pub fn unit(mut self, unit: &str) -> Column {
        self.key = slug(&format!("{} {}", self.name, unit.replace('%', "percent").replace('µ', "u")));
        self.unit = Some(unit.to_string());
        self
    }

    /// With so many digits after the point.
    #[must_use]
    pub fn decimals(mut self, digits: usize) -> Column {
        self.precision = Precision::Decimals(digits);
        self
    }

    /// With so many digits that matter.
    #[must_use]
    pub fn significant(mut self, digits: usize) -> Column {
        self.precision = Precision::Significant(digits);
        self
    }

    /// Another name for programs.
    #[must_use]
    pub fn key(mut self, key: &str) -> Column {
        self.key = key.to_string();
        self
    }

    /// Name and unit.
    pub fn heading(&self) -> String {
        match &self.unit {
            Some(unit) => format!("{} ({unit})", self.name),
            None => self.name.clone(),
        }
    }

    /// What a cell of this column shows.
    pub fn show(&self, cell: &Cell) -> String {
        match cell {
            Cell::Text(text) => text.clone(),
            Cell::Integer(n) => n.to_string(),
            Cell::Number(x) => self.precision.show(*x),
            Cell::MeanStd(mean, std) => {
                format!("{} ± {}", self.precision.show(*mean), self.precision.beside(*mean, *std))
            }
            Cell::Empty => String::new(),
            Cell::NotApplicable => "N/A".to_string(),
            Cell::OutOfMemory => "OOM".to_string(),
        }
    }
}

impl Precision {
    /// The number as text; infinities and NaN as words.
    pub fn show(self, x: f64) -> String {
        match self {
            _ if !x.is_finite() => x.to_string().replace("inf", "infinite"),
            Precision::Decimals(digits) => format!("{x:.digits$}"),
            Precision::Significant(digits) => significant(x, digits),
        }
    }

    /// A deviation with as many digits after the point as its mean has.
    fn beside(self, mean: f64, std: f64) -> String {
        match self {
            Precision::Decimals(_) => self.show(std),
            Precision::Significant(digits) => {
                let shown = significant(mean, digits);
                match (shown.contains('e'), shown.split_once('.')) {
                    (true, _) => significant(std, 2),
                    (false, Some((_, fraction))) => format!("{std:.*}", fraction.len()),
                    (false, None) => format!("{std:.0}"),
                }
            }
        }
    }
}

/// `digits` digits that matter: in plain notation from 0.001 to a million, with a power of ten beyond.
fn significant(x: f64, digits: usize) -> String {
    let last = digits.max(1) - 1;
    if x == 0.0 {
        return "0".to_string();
    }
    let scientific = format!("{x:.last$e}");
    // Read after rounding: 9.996 with three digits is 10.0.
    let exponent: i64 = scientific.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    match exponent {
        -3..=6 => format!("{x:.*}", usize::try_from(last as i64 - exponent).unwrap_or(0)),
        _ => scientific,
    }
}

impl Cell {
    /// A mean ± a standard deviation.
    pub fn mean_std(mean: f64, std: f64) -> Cell {
        Cell::MeanStd(mean, std)
    }

    /// Mean and sample standard deviation of some values: empty without values, no deviation with one.
    pub fn statistics(values: &[f64]) -> Cell {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        match values.len() {
            0 => Cell::Empty,
            1 => Cell::Number(mean),
            _ => Cell::MeanStd(mean, (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt()),
        }
    }

    /// The number in it, a mean where it is one.
    pub fn value(&self) -> Option<f64> {
        match self {
            Cell::Number(x) | Cell::MeanStd(x, _) => Some(*x),
            Cell::Integer(n) => Some(*n as f64),
            Cell::Text(_) | Cell::Empty | Cell::NotApplicable | Cell::OutOfMemory => None,
        }
    }

    /// The deviation of a mean.
    pub fn deviation(&self) -> Option<f64> {
        match self {
            Cell::MeanStd(_, std) => Some(*std),
            Cell::Text(_)
            | Cell::Integer(_)
            | Cell::Number(_)
            | Cell::Empty
            | Cell::NotApplicable
            | Cell::OutOfMemory => None,
        }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.to_string())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::Text(text)
    }
}

impl From<f64> for Cell {
    fn from(x: f64) -> Cell {
        Cell::Number(x)
    }
}

impl From<usize> for Cell {
    fn from(n: usize) -> Cell {
        i64::try_from(n).map_or(Cell::Number(n as f64), Cell::Integer)
    }
}

impl From<u64> for Cell {
    fn from(n: u64) -> Cell {
        i64::try_from(n).map_or(Cell::Number(n as f64), Cell::Integer)
    }
}

impl From<i64> for Cell {
    fn from(n: i64) -> Cell {
        Cell::Integer(n)
    }
}

impl<T: Into<Cell>> From<Option<T>> for Cell {
    /// Nothing is an empty cell.
    fn from(value: Option<T>) -> Cell {
        value.map_or(Cell::Empty, Into::into)
    }
}

impl Table {
    pub fn new(name: &str, title: &str, columns: impl IntoIterator<Item = Column>) -> Table {
        Table {
            name: name.to_string(),
            title: title.to_string(),
            columns: columns.into_iter().collect(),
            ..Table::default()
        }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// It has not one cell for each column: a mistake of the command that makes the table.
    pub fn push(&mut self, row: impl IntoIterator<Item = Cell>) {
        let row: Vec<Cell> = row.into_iter().collect();
        let (cells, columns) = (row.len(), self.columns.len());
        assert!(
            cells == columns,
            "internal error: a row of {cells} cells in the table `{}` of {columns} columns, please report",
            self.name
        );
        self.rows.push(row);
    }

    /// With a sentence below it.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Table {
        self.notes.push(note.into());
        self
    }

    /// Without the columns in which every cell is empty: they only make a table wide. A table without rows keeps all.
    #[must_use]
    pub fn without_empty_columns(mut self) -> Table {
        let used: Vec<bool> = (0..self.columns.len())
            .map(|c| self.rows.is_empty() || self.rows.iter().any(|row| row[c] != Cell::Empty))
            .collect();
        let keep = |index: &mut usize| {
            *index += 1;
            used[*index - 1]
        };
        let mut at = 0;
        self.columns.retain(|_| keep(&mut at));
        for row in &mut self.rows {
            let mut at = 0;
            row.retain(|_| keep(&mut at));
        }
        self
    }

    /// For a terminal.
    pub fn to_text(&self) -> String {
        super::format::text::table(self)
    }

    /// Which columns hold a deviation somewhere: they are two fields for programs.
    pub(super) fn has_deviation(&self, column: usize) -> bool {
        self.rows.iter().any(|row| row[column].deviation().is_some())
    }
}

/// Lower-case words joined by `_`.
fn slug(name: &str) -> String {
    let words = name.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("_").to_lowercase()
}
