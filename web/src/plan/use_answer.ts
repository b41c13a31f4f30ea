import { useEffect, useState } from "preact/hooks";
import { ApiError, post } from "../api";

/** The last answer stays while the next is on its way or could not be had. */
export interface Answer<T> {
  value: T | null;
  /** `value` is not the answer to what is asked now. */
  stale: boolean;
  error: ApiError | null;
  /** From asking to the answer, in milliseconds. */
  took: number;
}

const PAUSE_MS = 90;

/** Asks whenever `body` changes, a moment after; an answer that is no longer wanted is not waited for. */
export function useAnswer<T>(path: string, body: object | null): Answer<T> {
  const [answer, setAnswer] = useState<Answer<T>>({ value: null, stale: true, error: null, took: 0 });
  const asked = body && JSON.stringify(body);
  useEffect(() => {
    if (asked === null) {
      setAnswer((old) => ({ ...old, stale: true }));
      return;
    }
    const abort = new AbortController();
    setAnswer((old) => ({ ...old, stale: true }));
    const timer = setTimeout(async () => {
      const began = performance.now();
      try {
        const value = await post<T>(path, JSON.parse(asked), abort.signal);
        setAnswer({ value, stale: false, error: null, took: performance.now() - began });
      } catch (error) {
        if (abort.signal.aborted) return;
        if (!(error instanceof ApiError)) throw error;
        setAnswer((old) => ({ ...old, stale: true, error }));
      }
    }, PAUSE_MS);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [path, asked]);
  return answer;
}

const PATIENCE_MS = 400;

/** A value once it has stayed for a moment, so that words half typed are not complained about; null at once. */
export function useLater<T>(value: T | null): T | null {
  const [shown, setShown] = useState<T | null>(null);
  useEffect(() => {
    if (value === null) return;
    const timer = setTimeout(() => setShown(value), PATIENCE_MS);
    return () => clearTimeout(timer);
  }, [value]);
  return value === null ? null : shown;
}
