//! JSON and CSV: for programs, with all digits.

use serde_json::{Map, Value, json};

use crate::report::table::Precision;
use crate::report::{Cell, Column, Part, Plot, Report, Table};

/// JSON object of title, machine, each table as a list of objects, plots and texts. Images are omitted.
pub fn json(report: &Report) -> Value {
    let tables: Vec<Value> = report.tables().map(json_table).collect();
    let plot = |part: &Part| match part {
        Part::Plot(plot) => Some(plot.clone().finite()),
        Part::Table(_) | Part::Text(_) | Part::Image { .. } => None,
    };
    let text = |part: &Part| match part {
        Part::Text(text) => Some(text.clone()),
        Part::Table(_) | Part::Plot(_) | Part::Image { .. } => None,
    };
    let plots: Vec<Plot> = report.parts.iter().filter_map(plot).collect();
    let texts: Vec<String> = report.parts.iter().filter_map(text).collect();
    json!({
        "name": report.name, "title": report.title, "machine": report.machine,
        "tables": tables, "plots": plots, "texts": texts,
    })
}

fn json_table(table: &Table) -> Value {
    let column = |column: &Column| {
        let (decimals, significant) = match column.precision {
            Precision::Decimals(digits) => (Some(digits), None),
            Precision::Significant(digits) => (None, Some(digits)),
        };
        let Column { key, name, unit, .. } = column;
        json!({ "key": key, "name": name, "unit": unit, "decimals": decimals, "significant": significant })
    };
    let columns: Vec<Value> = table.columns.iter().map(column).collect();
    let rows: Vec<Value> = table.rows.iter().map(|row| json_row(table, row)).collect();
    json!({ "name": table.name, "title": table.title, "columns": columns, "rows": rows, "notes": table.notes })
}

fn json_row(table: &Table, row: &[Cell]) -> Value {
    let mut object = Map::new();
    for (column, cell) in table.columns.iter().zip(row) {
        let value = match cell {
            Cell::Text(text) => Value::from(text.as_str()),
            Cell::Integer(n) => Value::from(*n),
            Cell::Number(x) | Cell::MeanStd(x, _) => number(*x),
            Cell::Empty => Value::Null,
            Cell::NotApplicable | Cell::OutOfMemory => Value::from(column.format(cell)),
        };
        object.insert(column.key.clone(), value);
        if let Some(std) = cell.deviation() {
            object.insert(deviation_key(column), number(std));
        }
    }
    Value::Object(object)
}

/// Parses the output of [`json`]: texts first, then tables, then plots.
pub fn from_json(value: &Value) -> Result<Report, String> {
    let title = value["title"].as_str().ok_or("it has no title")?;
    let mut report = Report::new(value["name"].as_str().unwrap_or(title), title);
    report.machine = serde_json::from_value(value["machine"].clone()).unwrap_or(None);
    for text in value["texts"].as_array().into_iter().flatten() {
        report = report.text(text.as_str().ok_or("a text is not a string")?);
    }
    for table in value["tables"].as_array().ok_or("it has no tables")? {
        report = report.table(table_from_json(table)?);
    }
    for plot in value["plots"].as_array().into_iter().flatten() {
        let read = serde_json::from_value(plot.clone());
        report = report.plot(read.map_err(|error| format!("a plot cannot be read: {error}"))?);
    }
    Ok(report)
}

fn table_from_json(value: &Value) -> Result<Table, String> {
    let text = |value: &Value, key: &str| -> Result<String, String> {
        value[key].as_str().map(str::to_string).ok_or_else(|| format!("a table has no `{key}`"))
    };
    let rows = value["rows"].as_array().ok_or("a table has no `rows`")?;
    let mut table = Table::new(&text(value, "name")?, &text(value, "title")?, []);
    for column in value["columns"].as_array().ok_or("a table has no `columns`")? {
        let key = text(column, "key")?;
        let numeric = rows.iter().any(|row| row[&key].is_number());
        let name = text(column, "name")?;
        let read = if numeric { Column::number(&name) } else { Column::text(&name) };
        let digits = |key: &str| column[key].as_u64().and_then(|n| usize::try_from(n).ok());
        let read = digits("decimals").map_or(read.clone(), |n| read.decimals(n));
        let read = digits("significant").map_or(read.clone(), |n| read.significant(n));
        let read = column["unit"].as_str().map_or(read.clone(), |unit| read.unit(unit));
        table.columns.push(read.key(&key));
    }
    for row in rows {
        let cell = |column: &Column| match (&row[&column.key], row[deviation_key(column)].as_f64()) {
            (Value::Number(n), Some(std)) => Cell::MeanStd(n.as_f64().unwrap_or(f64::NAN), std),
            (Value::Number(n), None) => n.as_i64().map_or(Cell::Number(n.as_f64().unwrap_or(f64::NAN)), Cell::Integer),
            (Value::String(text), _) if text == "OOM" => Cell::OutOfMemory,
            (Value::String(text), _) if text == "N/A" => Cell::NotApplicable,
            (Value::String(text), _) => Cell::Text(text.clone()),
            _ => Cell::Empty,
        };
        let cells: Vec<Cell> = table.columns.iter().map(cell).collect();
        table.push(cells);
    }
    let notes = value["notes"].as_array().into_iter().flatten();
    table.notes = notes.filter_map(|note| note.as_str().map(str::to_string)).collect();
    Ok(table)
}

/// Converts a number. Infinities and NaN, which JSON lacks, become strings.
fn number(x: f64) -> Value {
    serde_json::Number::from_f64(x).map_or_else(|| Value::from(x.to_string()), Value::Number)
}

fn deviation_key(column: &Column) -> String {
    format!("{}_std", column.key)
}

/// Formats a table as CSV: a line of keys, then the rows. A column with any deviation becomes two columns.
pub fn csv(table: &Table) -> String {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let with_std: Vec<bool> = (0..table.columns.len()).map(|c| table.has_deviation(c)).collect();
    let mut header = Vec::new();
    for (column, &std) in table.columns.iter().zip(&with_std) {
        header.push(column.key.clone());
        header.extend(std.then(|| deviation_key(column)));
    }
    let mut records = vec![header];
    for row in &table.rows {
        let mut record = Vec::new();
        for ((column, cell), &std) in table.columns.iter().zip(row).zip(&with_std) {
            record.push(cell.value().map_or_else(|| column.format(cell), |value| value.to_string()));
            record.extend(std.then(|| cell.deviation().map(|std| std.to_string()).unwrap_or_default()));
        }
        records.push(record);
    }
    for record in records {
        writer.write_record(record).expect("records of one length go into memory");
    }
    let bytes = writer.into_inner().expect("memory takes what is left in the writer");
    String::from_utf8(bytes).expect("fields were text")
}
