// Formats numbers with units.

export function count(n) {
  return n.toLocaleString("en-US");
}

/** ["3.42", "MB"]: three digits at most, decimal units. */
export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return [unit ? digits(bytes) : String(Math.round(bytes)), units[unit]];
}

/** Three significant digits: 1,700, 61.3, 4.20. */
export function digits(value) {
  if (value >= 1000) return count(Math.round(value));
  return value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);
}

/** ["98.4", "%"] */
export function percent(share) {
  return [share >= 1 ? "100" : (Math.floor(share * 1000) / 10).toFixed(1), "%"];
}

export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}
