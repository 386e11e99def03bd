//! JSON and CSV: for programs, with all digits.

use serde_json::{Map, Value, json};

use crate::report::{Cell, Column, Report, Table};

/// Title, machine, and every table as a list of objects.
pub fn json(report: &Report) -> Value {
    let tables: Vec<Value> = report.tables().map(json_table).collect();
    json!({ "name": report.name, "title": report.title, "machine": report.machine, "tables": tables })
}

fn json_table(table: &Table) -> Value {
    let column = |column: &Column| json!({ "key": column.key, "name": column.name, "unit": column.unit });
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
            Cell::NotApplicable | Cell::OutOfMemory => Value::from(column.show(cell)),
        };
        object.insert(column.key.clone(), value);
        if let Some(std) = cell.deviation() {
            object.insert(deviation_key(column), number(std));
        }
    }
    Value::Object(object)
}

/// JSON has no infinities and no NaN: those are strings.
fn number(x: f64) -> Value {
    serde_json::Number::from_f64(x).map_or_else(|| Value::from(x.to_string()), Value::Number)
}

fn deviation_key(column: &Column) -> String {
    format!("{}_std", column.key)
}

/// A line of keys, then the rows. A column in which some number has a deviation is two columns.
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
            record.push(cell.value().map_or_else(|| column.show(cell), |value| value.to_string()));
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
