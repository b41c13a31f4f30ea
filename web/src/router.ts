import { useEffect, useState } from "preact/hooks";

/** Where the page is: `#/plan?model=...`. All that a view shows is in here, so a link is enough to share it. */
export interface Place {
  view: string;
  query: URLSearchParams;
}

export function readPlace(): Place {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { view: path, query: new URLSearchParams(query) };
}

export function linkTo(view: string, query: URLSearchParams = new URLSearchParams()): string {
  const text = query.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

/** Change what a view shows without a new entry in the browser's history. */
export function keepQuery(view: string, query: URLSearchParams): void {
  history.replaceState(null, "", linkTo(view, query));
}

export function usePlace(): Place {
  const [place, setPlace] = useState(readPlace);
  useEffect(() => {
    const moved = () => setPlace(readPlace());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return place;
}
