// Numbers, times and sizes for people.
const many = new Intl.NumberFormat("en", { maximumFractionDigits: 1, notation: "compact" });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const NONE = "–";
export const count = (value) =>
  value === null || value === undefined ? NONE : Math.abs(value) < 100000 ? whole.format(value) : many.format(value);
export const percent = (share, digits = 1) =>
  share === null || share === undefined ? NONE : `${(100 * share).toFixed(digits)} %`;
export const ms = (value) =>
  value === null || value === undefined
    ? NONE
    : value >= 10000
      ? `${(value / 1000).toFixed(1)} s`
      : value >= 100
        ? `${Math.round(value)} ms`
        : `${value.toFixed(1)} ms`;
export const us = (value) => ms(value / 1000);
export const short = (digest) => (digest ? digest.slice(0, 12) : NONE);
export const bytes = (value) => {
  if (!value) return NONE;
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${(value / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
};
export const time = (text) => {
  const date = new Date(text);
  if (!text || Number.isNaN(date.getTime())) return NONE;
  return date.toISOString().replace("T", " ").slice(0, 19);
};
export const money = (micros, currency) =>
  micros === null || micros === undefined ? NONE : `${(micros / 1e6).toFixed(micros < 1e6 ? 4 : 2)} ${currency}`;
export const words = (name) => name.replaceAll("_", " ");
export const span = (seconds) => {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
};
