//! A table of measurements, independent of output formats.

/// Description of one column.
#[derive(Clone, Debug, PartialEq)]
pub struct Column {
    /// Name for display.
    pub name: String,
    /// Key for programs: the field's name in JSON and CSV.
    pub key: String,
    /// Unit, for example `ms`. Shown in the heading, never in the cells.
    pub unit: Option<String>,
    pub precision: Precision,
    /// Whether the column is numeric: right-aligned.
    pub numeric: bool,
}

/// Number of digits for display. Files for programs have all digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Digits after the decimal point.
    Decimals(usize),
    /// Significant digits; large and small numbers use scientific notation.
    Significant(usize),
}

/// Content of one cell.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Text(String),
    Integer(i64),
    Number(f64),
    /// A mean and its sample standard deviation.
    MeanStd(f64, f64),
    /// No value.
    Empty,
    /// Not applicable.
    NotApplicable,
    /// Out of device memory.
    OutOfMemory,
}

/// A table: columns, rows of cells, notes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// Stem of file names: words joined by `-`.
    pub name: String,
    pub title: String,
    pub columns: Vec<Column>,
    pub rows: Vec<Vec<Cell>>,
    /// Notes below the table.
    pub notes: Vec<String>,
}

impl Column {
    fn new(name: &str, precision: Precision, numeric: bool) -> Column {
        Column { name: name.to_string(), key: slug(name), unit: None, precision, numeric }
    }

    /// A text column.
    pub fn text(name: &str) -> Column {
        Column::new(name, Precision::Significant(4), false)
    }

    /// A column of numbers, with four significant digits by default.
    pub fn number(name: &str) -> Column {
        Column::new(name, Precision::Significant(4), true)
    }

    /// A column of integers.
    pub fn integer(name: &str) -> Column {
        Column::new(name, Precision::Decimals(0), true)
    }

    /// Sets the unit and appends it to the key: `forward` in `ms` has the key `forward_ms`.
    #[must_use]
    pub fn unit(mut self, unit: &str) -> Column {
        self.key = slug(&format!("{} {}", self.name, unit.replace('%', "percent").replace('µ', "u")));
        self.unit = Some(unit.to_string());
        self
    }

    /// Sets the number of digits after the decimal point.
    #[must_use]
    pub fn decimals(mut self, digits: usize) -> Column {
        self.precision = Precision::Decimals(digits);
        self
    }

    /// Sets the number of significant digits.
    #[must_use]
    pub fn significant(mut self, digits: usize) -> Column {
        self.precision = Precision::Significant(digits);
        self
    }

    /// Sets the key.
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

    /// Formats a cell of this column.
    pub fn format(&self, cell: &Cell) -> String {
        match cell {
            Cell::Text(text) => text.clone(),
            Cell::Integer(n) => n.to_string(),
            Cell::Number(x) => self.precision.format(*x),
            Cell::MeanStd(mean, std) => {
                format!("{} ± {}", self.precision.format(*mean), self.precision.format_deviation(*mean, *std))
            }
            Cell::Empty => String::new(),
            Cell::NotApplicable => "N/A".to_string(),
            Cell::OutOfMemory => "OOM".to_string(),
        }
    }
}

impl Precision {
    /// Formats a number; infinities and NaN as words.
    pub fn format(self, x: f64) -> String {
        match self {
            _ if !x.is_finite() => x.to_string().replace("inf", "infinite"),
            Precision::Decimals(digits) => format!("{x:.digits$}"),
            Precision::Significant(digits) => significant(x, digits),
        }
    }

    /// Formats a deviation with as many decimals as its mean.
    fn format_deviation(self, mean: f64, std: f64) -> String {
        match self {
            Precision::Decimals(_) => self.format(std),
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

/// Formats with `digits` significant digits: plain notation from 0.001 to a million, else scientific.
fn significant(x: f64, digits: usize) -> String {
    let last = digits.max(1) - 1;
    if x == 0.0 {
        return "0".to_string();
    }
    let scientific = format!("{x:.last$e}");
    // The exponent after rounding: 9.996 with three digits is 10.0.
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

    /// Mean and sample standard deviation of `values`: empty without values, only the mean of a single value.
    pub fn statistics(values: &[f64]) -> Cell {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        match values.len() {
            0 => Cell::Empty,
            1 => Cell::Number(mean),
            _ => Cell::MeanStd(mean, (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt()),
        }
    }

    /// The number of the cell, or its mean.
    pub fn value(&self) -> Option<f64> {
        match self {
            Cell::Number(x) | Cell::MeanStd(x, _) => Some(*x),
            Cell::Integer(n) => Some(*n as f64),
            Cell::Text(_) | Cell::Empty | Cell::NotApplicable | Cell::OutOfMemory => None,
        }
    }

    /// The standard deviation, if the cell has one.
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
    /// None is an empty cell.
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
    /// The number of cells is not the number of columns: a bug of the command.
    pub fn push(&mut self, row: impl IntoIterator<Item = Cell>) {
        let row: Vec<Cell> = row.into_iter().collect();
        let (cells, columns) = (row.len(), self.columns.len());
        assert!(
            cells == columns,
            "internal error: a row of {cells} cells in the table `{}` of {columns} columns; please report this",
            self.name
        );
        self.rows.push(row);
    }

    /// Adds a note below the table.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Table {
        self.notes.push(note.into());
        self
    }

    /// Removes columns whose cells are all empty. A table without rows keeps all columns.
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

    /// Formats for a terminal.
    pub fn to_text(&self) -> String {
        super::format::text::table(self)
    }

    /// Whether any cell of a column has a deviation: such columns are two fields in files for programs.
    pub(super) fn has_deviation(&self, column: usize) -> bool {
        self.rows.iter().any(|row| row[column].deviation().is_some())
    }
}

/// Lower-case words joined by `_`.
fn slug(name: &str) -> String {
    let words = name.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("_").to_lowercase()
}
