import { useState } from "preact/hooks";
import { number, parameters } from "../format";
import type { Fitting } from "./types";

interface Column {
  name: string;
  of: (row: Fitting) => number | string;
  text: (row: Fitting) => string;
}

const room = (row: Fitting) => row.ways[0];
const COLUMNS: Column[] = [
  { name: "Model", of: (row) => row.model.toLowerCase(), text: (row) => row.model },
  { name: "Parameters", of: (row) => row.parameters, text: sizeOf },
  { name: "Least TP", of: (row) => room(row)?.tp ?? Infinity, text: (row) => String(room(row)?.tp ?? "–") },
  {
    name: "Weights/GPU",
    of: (row) => room(row)?.weights_gib_per_gpu ?? Infinity,
    text: (row) => (room(row) ? `${number(room(row)!.weights_gib_per_gpu)} GiB` : "–"),
  },
  {
    name: "KV tokens",
    of: (row) => room(row)?.kv_tokens ?? -1,
    text: (row) => room(row)?.kv_tokens.toLocaleString("en-US") ?? "–",
  },
  {
    name: "Longest context",
    of: (row) => room(row)?.longest_context ?? -1,
    text: (row) => room(row)?.longest_context.toLocaleString("en-US") ?? "–",
  },
  {
    name: "tok/s a user, at most",
    of: (row) => room(row)?.max_tokens_per_s_per_user ?? -1,
    text: (row) => (room(row) ? number(room(row)!.max_tokens_per_s_per_user) : "–"),
  },
];

function sizeOf(row: Fitting): string {
  const active = row.active_parameters < row.parameters ? ` · ${parameters(row.active_parameters)} active` : "";
  return `${parameters(row.parameters)}${active}`;
}

/** The whole catalog on this machine. A name puts that model into the question. */
export function Fits(props: { models: Fitting[]; machine: string; chosen: string; choose: (model: string) => void }) {
  const [by, setBy] = useState(1);
  const [falling, setFalling] = useState(true);
  const [all, setAll] = useState(false);
  const [word, setWord] = useState("");
  const fitting = props.models.filter((row) => row.ways.length > 0);
  const sign = falling ? -1 : 1;
  const key = COLUMNS[by]!.of;
  const named = (row: Fitting) => row.model.toLowerCase().includes(word.trim().toLowerCase());
  const rows = [...(all ? props.models : fitting)].filter(named).sort((a, b) => sign * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
  const sort = (index: number) => {
    setFalling(index === by ? !falling : index > 0);
    setBy(index);
  };
  return (
    <section class="card" aria-labelledby="fits">
      <div class="row spread">
        <h2 id="fits">
          Which models fit on {props.machine}{" "}
          <span class="quiet small">
            {fitting.length} of {props.models.length}
          </span>
        </h2>
        <label class="check">
          Filter
          <input type="search" value={word} onInput={(event) => setWord(event.currentTarget.value)} />
        </label>
        <label class="check">
          <input type="checkbox" checked={all} onChange={(event) => setAll(event.currentTarget.checked)} /> Show those that do not
        </label>
      </div>
      <div class="table-scroll" role="region" aria-labelledby="fits" tabIndex={0}>
        <table class="fits">
          <thead>
            <tr>
              {COLUMNS.map((column, index) => (
                <th
                  scope="col"
                  key={column.name}
                  aria-sort={index === by ? (falling ? "descending" : "ascending") : undefined}
                >
                  <button type="button" onClick={() => sort(index)}>
                    {column.name}
                    <span class="arrow" aria-hidden="true">
                      {index === by ? (falling ? "▾" : "▴") : ""}
                    </span>
                  </button>
                </th>
              ))}
              <th scope="col">Formats</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.model} class={row.model === props.chosen ? "chosen" : undefined}>
                <th scope="row">
                  <button type="button" class="link" onClick={() => props.choose(row.model)}>
                    {row.model}
                  </button>
                </th>
                {COLUMNS.slice(1).map((column) => (
                  <td key={column.name}>{column.text(row)}</td>
                ))}
                <td class="formats">
                  {row.ways.map((way) => (
                    <span class="tag" key={way.format}>
                      {way.format} TP≥{way.tp}
                    </span>
                  ))}
                  {row.why_not && <span class="why">{row.why_not}</span>}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="quiet small">
        Room is counted on the whole machine, in the first format named; smaller formats leave more. The speed is what the
        bandwidth allows at the least TP.
      </p>
    </section>
  );
}
