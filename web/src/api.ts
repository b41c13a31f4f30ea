import { ofTab } from "./storage";

const KEY = "phalanx.key";

/** Calls to the server this page came from. The key is kept for this tab alone, once the server has taken it. */
let key = ofTab.get(KEY) ?? "";

export const hasKey = (): boolean => key !== "";

export function useKey(given: string): void {
  key = given;
}

export function keepKey(): void {
  ofTab.set(KEY, key);
}

export function forgetKey(): void {
  key = "";
  ofTab.remove(KEY);
}

/** An error in the words of the server. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    /** The part of the question that it is about. */
    readonly param: string | null = null,
  ) {
    super(message);
  }
}

export async function call(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key) headers.set("authorization", `Bearer ${key}`);
  let answer: Response;
  try {
    answer = await fetch(path, { ...init, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The server does not answer.");
  }
  if (!answer.ok) throw await told(answer);
  return answer;
}

async function told(answer: Response): Promise<ApiError> {
  try {
    const { error } = await answer.json();
    return new ApiError(answer.status, error.code ?? "error", error.message ?? answer.statusText, error.param ?? null);
  } catch {
    return new ApiError(answer.status, "error", `The server answered ${answer.status}.`);
  }
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await call(path, { signal })).json();
}

export async function post<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  return (await postStream(path, body, signal)).json();
}

export function postStream(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  return call(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

/** The `data:` of every event of a stream, until it ends or is aborted. */
export async function* events(answer: Response): AsyncGenerator<string> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop()!;
      for (const part of parts) {
        const data = part
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
