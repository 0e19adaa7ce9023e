//! Formats figures of several runs.

/// Mean and standard deviation.
pub fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    (mean, variance.sqrt())
}

/// The mean, with the standard deviation if there are several values.
pub fn spread(values: &[f64], digits: usize, unit: &str) -> String {
    // Adding zero turns a rounded "-0" into "0".
    let shown = |x: f64| format!("{:.digits$}", (x * 1e6).round() / 1e6 + 0.0);
    let (mean, deviation) = mean_and_deviation(values);
    if values.len() > 1 {
        format!("{} ± {}{unit}", shown(mean), shown(deviation))
    } else {
        format!("{}{unit}", shown(mean))
    }
}

/// Shares as percentages.
pub fn percent(values: &[f64]) -> String {
    spread(&values.iter().map(|v| 100.0 * v).collect::<Vec<_>>(), 1, "%")
}
