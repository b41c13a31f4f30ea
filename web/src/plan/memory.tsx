import { gib, number } from "../format";
import type { Fit, Line, Rank } from "./types";

/** What a rank's memory goes to, in the order of the bar. */
const PARTS = ["Weights", "KV cache", "Activations", "Runtime", "Left alone"] as const;
type Part = (typeof PARTS)[number];
const MOST_ROWS = 8;

function partOf(line: Line): Part {
  if (line.what.startsWith("weights")) return "Weights";
  if (line.what.includes("activations")) return "Activations";
  return line.what.startsWith("left") ? "Left alone" : "Runtime";
}

function split(rank: Rank): Record<Part, number> {
  const sizes: Record<Part, number> = { Weights: 0, "KV cache": Math.max(rank.kv_bytes, 0), Activations: 0, Runtime: 0, "Left alone": 0 };
  for (const line of rank.lines.slice(1)) sizes[partOf(line)] -= line.bytes;
  return sizes;
}

interface Row {
  name: string;
  rank: Rank;
  sizes: Record<Part, number>;
}

/** A row a rank; on large machines neighbours that are alike share one. */
function rowsOf(fit: Fit): Row[] {
  const rows: (Row & { last: number })[] = [];
  for (const rank of fit.ranks) {
    const sizes = split(rank);
    const above = rows.at(-1);
    const alike = above && above.rank.gpu === rank.gpu && PARTS.every((part) => above.sizes[part] === sizes[part]);
    if (alike && fit.ranks.length > MOST_ROWS) {
      above.last = rank.rank;
      above.name = `Ranks ${above.rank.rank}–${rank.rank}`;
    } else rows.push({ name: `Rank ${rank.rank}`, rank, sizes, last: rank.rank });
  }
  return rows;
}

/** A bar for every rank, with its numbers beside it. */
export function Memory(props: { fit: Fit; replicas: number; sequences: number; tokens: number }) {
  const { fit } = props;
  const rows = rowsOf(fit);
  const largest = Math.max(...fit.ranks.map((rank) => rank.lines[0]!.bytes));
  const uneven = new Set(fit.ranks.map((rank) => rank.weight_bytes)).size > 1;
  const tight = fit.ranks.find((rank) => rank.rank === fit.tightest_rank)!;
  return (
    <section class="card" aria-labelledby="memory">
      <h2 id="memory">
        Memory of each GPU <span class="quiet small">GiB{props.replicas > 1 ? ", one replica" : ""}</span>
        {uneven && <span class="tag">uneven shards</span>}
      </h2>
      <div class="memory" role="table" aria-label="Memory of each rank in GiB">
        <div role="row" class="head">
          <span role="columnheader">Rank</span>
          <span role="columnheader" class="bar-head">
            <span class="hidden-label">Bar</span>
          </span>
          {PARTS.map((part, index) => (
            <span role="columnheader" key={part}>
              <i class={`swatch part-${index}`} />
              {part}
            </span>
          ))}
        </div>
        {rows.map((row) => (
          <div role="row" key={row.rank.rank}>
            <span role="cell" class="who">
              {row.name} <span class="quiet">{row.rank.gpu}</span>
            </span>
            <span role="cell" class="bar-cell">
              <span class="bar-track" style={{ width: `${(100 * row.rank.lines[0]!.bytes) / largest}%` }}>
                {PARTS.map((part, index) => (
                  <i
                    key={part}
                    class={`part-${index}`}
                    style={{ width: `${(100 * row.sizes[part]) / row.rank.lines[0]!.bytes}%` }}
                  />
                ))}
              </span>
            </span>
            {PARTS.map((part) => (
              <span role="cell" key={part} class="size">
                {(row.sizes[part] / 2 ** 30).toFixed(1)}
              </span>
            ))}
          </div>
        ))}
      </div>
      <p class="quiet small">
        {uneven && `Rank ${tight.rank} is the tightest. `}
        {number(fit.kv_bytes_per_token / 1024)} KiB of KV a token: room for {fit.kv_tokens.toLocaleString("en-US")} tokens.
        This load fills {Math.min(100, Math.round((100 * props.sequences * props.tokens) / fit.kv_tokens))} % of it.
      </p>
      {fit.notes.map((note) => (
        <p class="small note-line" key={note}>
          {note}
        </p>
      ))}
      <details>
        <summary>How it adds up on rank {tight.rank}</summary>
        <table class="sum">
          <tbody>
            {tight.lines.map((line) => (
              <tr key={line.what}>
                <th scope="row">{line.what}</th>
                <td>{(line.bytes / 2 ** 30).toFixed(2).replace("-", "−")}</td>
                <td class="how">{line.how}</td>
              </tr>
            ))}
            <tr class="total">
              <th scope="row">left for KV</th>
              <td>{(tight.kv_bytes / 2 ** 30).toFixed(2)}</td>
              <td class="how">{gib(tight.kv_bytes)}</td>
            </tr>
          </tbody>
        </table>
      </details>
    </section>
  );
}
