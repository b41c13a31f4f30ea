/** Numbers as a person reads them. */
export function number(value: number, digits = 3): string {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10 ** (digits - 1)) return Math.round(value).toLocaleString("en-US");
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

export const gib = (bytes: number): string => `${number(bytes / 2 ** 30)} GiB`;

export const percent = (share: number): string => `${number(share * 100, share < 0.1 ? 2 : 3)} %`;

export const money = (dollars: number): string =>
  dollars >= 1000 ? `$${Math.round(dollars).toLocaleString("en-US")}` : `$${dollars.toFixed(2)}`;

export function millis(value: number): string {
  return value >= 10_000 ? `${number(value / 1000)} s` : `${number(value)} ms`;
}

export function parameters(count: number): string {
  return count >= 1e12 ? `${number(count / 1e12)} T` : count >= 1e9 ? `${number(count / 1e9)} B` : `${number(count / 1e6)} M`;
}
