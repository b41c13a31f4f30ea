/** Four spears abreast, as in `favicon.svg`. */
export function Emblem() {
  return (
    <svg class="emblem" viewBox="0 0 32 32" width="20" height="20" aria-hidden="true">
      <rect width="32" height="32" rx="7" />
      <path d="M5 27V10l2-4 2 4v17zm6 0V8l2-4 2 4v19zm6 0V8l2-4 2 4v19zm6 0V10l2-4 2 4v17z" />
    </svg>
  );
}
