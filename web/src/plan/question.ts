/** The question of the page: as it was typed, in the page's address, and as the planner takes it. */
export interface Question {
  model: string;
  machine: string;
  engine: string;
  format: string;
  kv: string;
  input: string;
  output: string;
  context: string;
  concurrency: string;
  ttft: string;
  tpot: string;
  kwh: string;
  years: string;
  rate: string;
  prefix: string;
  agents: string;
  tp: string;
  os: string;
  network: string;
}

export const USUAL: Question = {
  model: "Llama-3.3-70B",
  machine: "4xH100-SXM",
  engine: "phalanx",
  format: "",
  kv: "bf16",
  input: "1024",
  output: "256",
  context: "",
  concurrency: "32",
  ttft: "",
  tpot: "",
  kwh: "0.12",
  years: "4",
  rate: "",
  prefix: "0",
  agents: "1",
  tp: "",
  os: "linux",
  network: "",
};

const NAMES = Object.keys(USUAL) as (keyof Question)[];
const LONGEST = 200;

/** A word that the address does not have is the usual one. Null where it has none: then nothing was shared. */
export function fromQuery(query: URLSearchParams): Question | null {
  if (!NAMES.some((name) => query.has(name))) return null;
  const read = (name: keyof Question) => (query.get(name) ?? USUAL[name]).slice(0, LONGEST);
  return Object.fromEntries(NAMES.map((name) => [name, read(name)])) as unknown as Question;
}

/** Every word that is not the usual one, an empty one too: a link must not fill it in. */
export function toQuery(question: Question): URLSearchParams {
  const told = NAMES.filter((name) => question[name] !== USUAL[name] || name === "model" || name === "machine");
  return new URLSearchParams(told.map((name) => [name, question[name]]));
}

/** One kind of card in a machine, as it is written: `4xH100-SXM`; in several boxes `2x8xH100-SXM`. */
export interface Part {
  count: number;
  gpu: string;
  boxes?: number;
}

export function partsOf(machine: string): Part[] {
  return machine.split("+").map((part) => {
    const [, boxes, count, gpu] = /^\s*(?:(?:(\d+)\s*[x*]\s*)?(\d+)\s*[x*])?\s*(.*?)\s*$/i.exec(part)!;
    const known = { count: count === undefined ? 1 : Number(count), gpu: gpu! };
    return boxes === undefined ? known : { ...known, boxes: Number(boxes) };
  });
}

export function machineOf(parts: Part[]): string {
  return parts.map((part) => `${part.boxes ? `${part.boxes}x` : ""}${part.count}x${part.gpu}`).join("+");
}

const sizeOf = (machine: string): number =>
  partsOf(machine).reduce((sum, part) => sum + part.count * (part.boxes ?? 1), 0);

/** Powers of two up to the machine's size, and all of it: those are compared side by side. */
export function degrees(machine: string): number[] {
  const gpus = sizeOf(machine);
  const found = [1, 2, 4, 8, 16, 32, 64].filter((tp) => tp < gpus);
  return gpus >= 1 && gpus <= 64 ? [...found, gpus] : found;
}

/** The degrees that are asked for: the one that is forced, or all that are compared. */
export function asked(question: Question): number[] {
  return question.tp ? [Number(question.tp)] : degrees(question.machine);
}

export type Wrong = { [name in keyof Question]?: string };

const NUMBERS = [
  ["input", 1, 1_000_000],
  ["output", 1, 1_000_000],
  ["concurrency", 1, 4096],
  ["prefix", 0, 1_000_000],
  ["agents", 1, 10_000],
] as const;

export const longest = (question: Question): number => Number(question.input) + Number(question.output);

function covers(question: Question): boolean {
  const context = Number(question.context);
  return Number.isInteger(context) && context >= longest(question) && context <= 1_000_000;
}

/** What can be said without asking. */
export function check(question: Question): Wrong {
  const wrong: Wrong = {};
  for (const [name, least, most] of NUMBERS) {
    const value = Number(question[name]);
    if (!question[name].trim() || !Number.isInteger(value) || value < least || value > most)
      wrong[name] = `A whole number, ${least} to ${most.toLocaleString("en-US")}.`;
  }
  if (question.context.trim() && !wrong.input && !wrong.output && !covers(question))
    wrong.context = `At least ${longest(question)}, up to 1,000,000; or nothing.`;
  for (const name of ["ttft", "tpot"] as const)
    if (question[name].trim() && !(Number(question[name]) > 0)) wrong[name] = "Milliseconds above 0, or nothing.";
  if (question.rate.trim() && !(Number(question.rate) > 0 && Number(question.rate) <= 100_000))
    wrong.rate = "Requests a second above 0, or nothing.";
  if (!wrong.input && !wrong.prefix && Number(question.prefix) > Number(question.input)) wrong.prefix = "At most the input tokens.";
  if (!(Number(question.kwh) >= 0 && Number(question.kwh) <= 10)) wrong.kwh = "0 to 10 USD.";
  if (!(Number(question.years) > 0 && Number(question.years) <= 50)) wrong.years = "Above 0, up to 50.";
  if (!question.model.trim()) wrong.model = "Name a model.";
  if (!question.machine.trim()) wrong.machine = "Name a machine.";
  return wrong;
}

/** Names of the planner's own fields, for errors that it tells of them. */
export const FIELD_OF: Record<string, keyof Question> = {
  model: "model",
  machine: "machine",
  input_tokens: "input",
  output_tokens: "output",
  concurrency: "concurrency",
  engines: "engine",
  formats: "format",
  kv_format: "kv",
  electricity: "kwh",
  years: "years",
  context: "context",
  rate: "rate",
  shared_prefix: "prefix",
  agents: "agents",
  tps: "tp",
  os: "os",
  network: "network",
};

function slo(question: Question): string {
  const goals = (["ttft", "tpot"] as const).filter((name) => question[name].trim());
  return goals.map((name) => `${name}:${Number(question[name])}`).join(",");
}

export function toBody(question: Question) {
  return {
    model: question.model.trim(),
    machine: question.machine.trim(),
    input_tokens: Number(question.input),
    output_tokens: Number(question.output),
    concurrency: Number(question.concurrency),
    slo: slo(question),
    engines: question.engine,
    tps: asked(question).join(","),
    formats: question.format,
    kv_format: question.kv,
    electricity: Number(question.kwh),
    years: Number(question.years),
    context: question.context.trim() ? Number(question.context) : null,
    rate: question.rate.trim() ? Number(question.rate) : null,
    shared_prefix: Number(question.prefix),
    agents: Number(question.agents),
    os: question.os,
    network: question.network,
  };
}

const FLAGS = [
  ["--isl", (asked: Question) => asked.input],
  ["--osl", (asked: Question) => asked.output],
  ["--context", (asked: Question) => asked.context.trim()],
  ["--concurrency", (asked: Question) => (asked.rate.trim() ? "" : asked.concurrency)],
  ["--engine", (asked: Question) => asked.engine],
  ["--format", (asked: Question) => asked.format],
  ["--kv-format", (asked: Question) => asked.kv],
  ["--slo", slo],
  ["--tp", (question: Question) => asked(question).join(",")],
  ["--rate", (asked: Question) => asked.rate.trim()],
  ["--shared-prefix", (asked: Question) => (Number(asked.prefix) ? asked.prefix : "")],
  ["--agents", (asked: Question) => (asked.agents === USUAL.agents ? "" : asked.agents)],
  ["--os", (asked: Question) => (asked.os === USUAL.os ? "" : asked.os)],
  ["--network", (asked: Question) => asked.network],
  ["--electricity", (asked: Question) => (asked.kwh === USUAL.kwh ? "" : asked.kwh)],
  ["--years", (asked: Question) => (asked.years === USUAL.years ? "" : asked.years)],
] as const;

/** The same question to the command line. */
export function toCommand(question: Question): string[] {
  const flags = FLAGS.flatMap(([flag, of]) => (of(question) ? [flag, of(question)] : []));
  return ["phalanx", "plan", question.model.trim(), "--machine", question.machine.trim(), ...flags];
}

/** Words for a POSIX shell. */
export function shell(words: string[]): string {
  return words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`)).join(" ");
}
